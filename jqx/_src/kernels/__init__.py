"""Kernels for GPUs and TPUs in Pallas, and calls of the kernels of jqx-cpu, on arrays."""
