"""Kernels in Pallas, for GPUs and TPUs: arrays in, arrays out. Formulations of contractions run
them where `pack_for` has laid a weight out for one.
"""
