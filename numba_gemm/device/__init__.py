"""The CUDA driver: contexts, modules, launches, memory, streams. Only this package imports ``cuda.bindings.driver``."""
