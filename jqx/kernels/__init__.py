"""Kernels in Pallas, for GPUs and TPUs: arrays in, arrays out."""
