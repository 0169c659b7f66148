"""What tests of several rooms use."""

from tests.pretend_cuda import cuda_device

__all__ = ["cuda_device"]
