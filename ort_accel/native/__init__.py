"""The native library: kernels in C++, and the custom operators by which ONNX Runtime calls them and PyTorch's."""
