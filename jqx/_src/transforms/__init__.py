"""Functional transforms: plan, calibrate, simulate, quantize, and convert any JAX function."""
