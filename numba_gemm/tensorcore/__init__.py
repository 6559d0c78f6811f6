"""The host half of the tensor-core kernels in ``ptx/``."""
