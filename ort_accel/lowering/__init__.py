"""From a functional ATen graph to ONNX models and the nodes that PyTorch keeps."""
