"""QSpec, QTensor, and its views, which keep the scale in step with the values."""
