"""Choosing by measurement who runs what, where ONNX Runtime and PyTorch both can."""
