"""The parameter lists of the kernels, as the bytes that their PTX declares: each value at its natural alignment."""

from __future__ import annotations

import struct

#: A, B, C; M, N, K; lda, ldb, ldc in elements; alpha, beta.
GEMM_F32 = struct.Struct("<3Q3I4x3q2f")

#: The same, and the strides between the matrices of a batch, of A, B, C, in elements; ctaid.z is the batch index.
GEMM_F32_BATCHED = struct.Struct("<3Q3I4x3q2f3q")

#: The same as GEMM_F32, and flags: bit 0, C is float32; bit 1, A is aligned for 16-byte copies; bit 2, B is.
GEMM_16 = struct.Struct("<3Q3I4x3q2fI")

#: The same as GEMM_F32, and the workspace and the depth of one split.
GEMM_SPLIT_K = struct.Struct("<3Q3I4x3q2fQI")

#: Workspace, C; M, N; ldc; alpha, beta; number of splits.
REDUCE = struct.Struct("<2Q2Iq2fI")

#: Source, target; rows, columns; row and column stride of the source, then of the target, in elements.
REPACK = struct.Struct("<2Q2I4q")

PARAMETERS = {
    "gemm_f32": GEMM_F32,
    "gemm_f32_batched": GEMM_F32_BATCHED,
    "gemm_16": GEMM_16,
    "t4": GEMM_F32,
    "t4_split_k": GEMM_SPLIT_K,
    "splitk_reduce": REDUCE,
    "repack_16": REPACK,
    "repack_32": REPACK,
}
