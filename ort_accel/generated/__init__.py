"""Kernels that PyTorch's Inductor generates for clusters of operators, compiled and measured in the background."""
