"""``python -m numba_gemm``: the command line."""

from numba_gemm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
