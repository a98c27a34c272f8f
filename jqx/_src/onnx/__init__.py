"""Functions as ONNX models, with the quantization of their plan."""
