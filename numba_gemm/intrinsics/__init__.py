"""Inline PTX for Numba CUDA kernels: what Numba has no words for.

Numba never emits a 16-byte global load by itself, a 16-byte shared access only where it can prove the alignment, and
``cp.async`` not at all. These intrinsics state them; they are ordinary functions inside a ``@cuda.jit`` kernel.

========================================  ============================================================================
``offset_pointer``, ``shared_address``    pointer arithmetic; a shared array's place as the 32-bit address PTX wants
``load_global``, ``_v2``, ``_v4``         1, 2, 4 floats by the read-only path (``ld.global.nc``)
``load_global_stream``, ``_v2``, ``_v4``  the same, read once: not kept in L1, 128 bytes fetched into L2
``load_global_first_v4``, ``_keep_v4``    the same, first or last to leave L1
``store_global_v2``, ``_v4``              2, 4 floats (``st.global``)
``store_global_stream``, ``_v2``, ``_v4``  the same, written and not read again (``st.global.cs``)
``load_shared_v2``, ``_v4``, …            2, 4 floats of a shared array, by flat index; ``store_shared_v2``, ``_v4``
``load_shared_at``, ``_v2_at``, ``_v4_at``  the same by 32-bit address; ``store_shared_at``, ``_v2_at``, ``_v4_at``
``cp_async_4``, ``_8``, ``_16``, …        global → shared without registers; with zero fill, a predicate, L2 hints
``cp_async_commit``, ``cp_async_wait``    its groups; ``cp_async_wait_all``
``griddepcontrol_wait``, …                for launches that overlap (sm_90; nothing before);
                                          ``griddepcontrol_launch_dependents``
``prefetch_l1``, ``prefetch_l2``          a hint that an address will be read
``float2_to_half2``, ``_to_bfloat2``      two floats rounded into one 32-bit register (``cvt.rn.f16x2.f32``, …)
========================================  ============================================================================

**Bounds of use**, for all of them:

- ``index`` counts elements of the pointer or array, flat and signed, 64 bits for global memory, 32 for shared. An
  address must be a multiple of the access's size (16 bytes for ``_v4`` and ``cp_async_16``, 8 for ``_v2`` and
  ``cp_async_8``, 4 else): a misaligned one faults on the GPU, and is the hazard ``Misaligned`` on the emulator.
- A *pointer* is a ``CPointer`` parameter or a global array (C order, indexed flat); a shared array is declared with
  ``alignment=16`` where it is accessed by more than 4 bytes. A pointer of another state space is undefined behaviour.
- Loads by the read-only path must not read what the same kernel writes.
- ``cp_async_*``, the two-float conversions and ``load_global_stream256_v4`` need compute capability 8.0; everything
  else runs from 7.5 on. The assembler refuses what an architecture lacks.

Importing this package imports Numba; kernels import it when they are compiled, not before.
"""

from __future__ import annotations

from numba_gemm.intrinsics.async_copy import (
    cp_async_4,
    cp_async_4_if,
    cp_async_4_zfill,
    cp_async_8,
    cp_async_8_if,
    cp_async_8_zfill,
    cp_async_16,
    cp_async_16_ca,
    cp_async_16_ca_zfill,
    cp_async_16_if,
    cp_async_16_l2_128_zfill,
    cp_async_16_l2_256_zfill,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    cp_async_wait_all,
)
from numba_gemm.intrinsics.conversion import float2_to_bfloat2, float2_to_half2
from numba_gemm.intrinsics.dependence import griddepcontrol_launch_dependents, griddepcontrol_wait
from numba_gemm.intrinsics.global_access import (
    load_global,
    load_global_first_v4,
    load_global_keep_v4,
    load_global_stream,
    load_global_stream256_v4,
    load_global_stream_v2,
    load_global_stream_v4,
    load_global_v2,
    load_global_v4,
    prefetch_l1,
    prefetch_l2,
    store_global_stream,
    store_global_stream_v2,
    store_global_stream_v4,
    store_global_v2,
    store_global_v4,
)
from numba_gemm.intrinsics.pointers import offset_pointer, shared_address
from numba_gemm.intrinsics.shared_access import (
    load_shared_at,
    load_shared_v2,
    load_shared_v2_at,
    load_shared_v4,
    load_shared_v4_at,
    store_shared_at,
    store_shared_v2,
    store_shared_v2_at,
    store_shared_v4,
    store_shared_v4_at,
)

__all__ = [
    "cp_async_4",
    "cp_async_4_if",
    "cp_async_4_zfill",
    "cp_async_8",
    "cp_async_8_if",
    "cp_async_8_zfill",
    "cp_async_16",
    "cp_async_16_ca",
    "cp_async_16_ca_zfill",
    "cp_async_16_if",
    "cp_async_16_l2_128_zfill",
    "cp_async_16_l2_256_zfill",
    "cp_async_16_zfill",
    "cp_async_commit",
    "cp_async_wait",
    "cp_async_wait_all",
    "float2_to_bfloat2",
    "float2_to_half2",
    "griddepcontrol_launch_dependents",
    "griddepcontrol_wait",
    "load_global",
    "load_global_first_v4",
    "load_global_keep_v4",
    "load_global_stream",
    "load_global_stream256_v4",
    "load_global_stream_v2",
    "load_global_stream_v4",
    "load_global_v2",
    "load_global_v4",
    "load_shared_at",
    "load_shared_v2",
    "load_shared_v2_at",
    "load_shared_v4",
    "load_shared_v4_at",
    "offset_pointer",
    "prefetch_l1",
    "prefetch_l2",
    "shared_address",
    "store_global_stream",
    "store_global_stream_v2",
    "store_global_stream_v4",
    "store_global_v2",
    "store_global_v4",
    "store_shared_at",
    "store_shared_v2",
    "store_shared_v2_at",
    "store_shared_v4",
    "store_shared_v4_at",
]
