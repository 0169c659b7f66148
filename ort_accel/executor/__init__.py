"""Runs a compiled graph: a program of segments, executed by ONNX Runtime sessions and by PyTorch."""
