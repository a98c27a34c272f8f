"""One call that turns a function and its weights into a quantized function, which files store."""
