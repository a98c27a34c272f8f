"""Error and sensitivity of each layer, and what compilers make of a quantized function."""
