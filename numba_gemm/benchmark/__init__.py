"""The machinery of ``numba-gemm bench`` and of the scripts in ``bench/``: shapes, peers, runs, records, tables."""
