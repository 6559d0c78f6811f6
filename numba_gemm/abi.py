"""The parameter lists of the kernels, as the bytes that their PTX declares: each value at its natural alignment."""

from __future__ import annotations

import struct

#: A, B, C; M, N, K; lda, ldb, ldc in elements; alpha, beta.
GEMM_F32 = struct.Struct("<3Q3I4x3q2f")

#: The same, and the strides between the matrices of a batch, of A, B, C, in elements; ctaid.z is the batch index.
GEMM_F32_BATCHED = struct.Struct("<3Q3I4x3q2f3q")

#: The same as GEMM_F32, and flags: bit 0, C is float32; bit 1, A is aligned for 16-byte copies; bit 2, B is.
GEMM_16 = struct.Struct("<3Q3I4x3q2fI")

#: The same as GEMM_F32_BATCHED, and the workspace and the depth of one split.
GEMM_SPLIT_K = struct.Struct("<3Q3I4x3q2f3qQI")

#: Workspace, C; M, N; ldc; alpha, beta; number of splits; the batch stride of C; ctaid.z is the batch index.
REDUCE = struct.Struct("<2Q2Iq2fI4xq")

#: Source, target; rows, columns; in elements row and column stride of the source, then of the target, and the strides
#: between the matrices of a batch, of source and target; ctaid.z is the batch index.
REPACK = struct.Struct("<2Q2I6q")

#: The same of two copies; blocks of the first; matrices in the batch of each.
REPACK_PAIR = struct.Struct("<2Q2I6q2Q2I6q3I")

#: W, x, y; J outputs, K, depth of one part of K; ldw, stride of x, of y; alpha, beta; batch strides of W, x, y;
#: stride from one part's y to the next.
GEMV = struct.Struct("<3Q3I4x3q2f4q")

#: Partial sums, y; J, number of parts; stride of y; alpha, beta; batch stride of y.
GEMV_SUM = struct.Struct("<2Q2Iq2fq")

#: W, X, C, workspace; J, I, K; ldw, strides of X along I and K, of C along I and J; alpha, beta; batch strides of W, X
#: and C.
SKINNY = struct.Struct("<4Q3I4x5q2f3q")

#: Workspace, C; J, I, K, blocks of the product's launch; strides of C along I and J; alpha, beta; batch stride of C.
SKINNY_FIXUP = struct.Struct("<2Q4I2q2fq")

#: W, X, C; J, I, K, depth of one part of K; ldw, strides of X along I and K, of C along I and J; alpha, beta; batch
#: strides of W, X, C; stride from one part's C to the next.
THIN = struct.Struct("<3Q4I5q2f4q")

#: A, B, C; M, N, K; strides of A along M and K, ldb, ldc; alpha, beta; batch strides of A, B, C.
OUTER = struct.Struct("<3Q3I4x4q2f3q")

#: Partial sums, C; J, I, number of parts; strides of C along I and J; alpha, beta; batch stride of C.
THIN_SUM = struct.Struct("<2Q3I4x2q2fq")

#: The same as GEMM_F32_BATCHED, and the workspace; tiles whose k is shared, blocks that share it, stages of each such
#: block.
GEMM_F32_SPLIT = struct.Struct("<3Q3I4x3q2f3qQ3I")

#: Workspace, C; M, N; ldc; alpha, beta; batch stride of C; tiles whose k was shared, blocks that shared it, stages of
#: each such block, stages in K.
SPLIT_K_SUM = struct.Struct("<2Q2Iq2fq4I")

#: Tensor maps of A, B, C; C, or the workspace of partial sums; ldc, batch stride of C; M, N, K, batch, parts of K,
#: 64-deep blocks of one part; alpha, beta.
WGMMA = struct.Struct("<128s128s128sQqq6I2f")

#: Tensor maps of A and B, then GEMM_F32_BATCHED's list or, where K is split, GEMM_SPLIT_K's.
T4_TMA = struct.Struct("<128s128s3Q3I4x3q2f3q")
T4_TMA_SPLIT_K = struct.Struct("<128s128s3Q3I4x3q2f3qQI")

PARAMETERS = {
    "gemm_f32_split": GEMM_F32_SPLIT,
    "split_k_sum": SPLIT_K_SUM,
    "gemm_f32": GEMM_F32,
    "gemm_f32_batched": GEMM_F32_BATCHED,
    "gemm_16": GEMM_16,
    "t4": GEMM_F32_BATCHED,
    "t4_split_k": GEMM_SPLIT_K,
    "t4_tma": T4_TMA,
    "t4_tma_split_k": T4_TMA_SPLIT_K,
    "splitk_reduce": REDUCE,
    "wgmma": WGMMA,
    "gemv": GEMV,
    "gemv_sum": GEMV_SUM,
    "skinny": SKINNY,
    "skinny_fixup": SKINNY_FIXUP,
    "thin": THIN,
    "thin_sum": THIN_SUM,
    "outer": OUTER,
    "repack_16": REPACK,
    "repack_32": REPACK,
    "repack_pair_16": REPACK_PAIR,
    "repack_pair_32": REPACK_PAIR,
}
