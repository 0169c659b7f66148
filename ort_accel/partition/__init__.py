"""Decides who runs each node, and cuts a graph into segments of ONNX Runtime and of PyTorch."""
