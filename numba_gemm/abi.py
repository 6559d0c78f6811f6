"""The parameter lists of the kernels, as the bytes that their PTX declares: each value at its natural alignment."""

from __future__ import annotations

import struct

#: A, B, C; M, N, K; lda, ldb, ldc in elements; alpha, beta.
GEMM_F32 = struct.Struct("<3Q3I4x3q2f")

#: Source, target; rows, columns; row and column stride of the source, then of the target, in elements.
REPACK_F32 = struct.Struct("<2Q2I4q")

PARAMETERS = {"gemm_f32": GEMM_F32, "repack_f32": REPACK_F32}
