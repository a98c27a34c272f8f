"""Kernels for GPUs and TPUs in Pallas, and calls of the kernels of jqx-cpu, on arrays. The
formulations of contractions run them for weights that `pack_for` has laid out for a kernel.
"""
