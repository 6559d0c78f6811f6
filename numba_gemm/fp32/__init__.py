"""FP32 on the CUDA cores: the ladder `v1` … `v7` in Numba CUDA Python, one file a rung, one idea a file."""
