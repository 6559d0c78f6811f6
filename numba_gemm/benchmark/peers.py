"""What the kernels are compared with on a GPU: cuBLAS, called on raw device pointers.

Whichever package brings cuBLAS, it is called through its C interface: a call then costs a few microseconds on the
host, and it can be captured into a graph, which CuPy's own binding refuses. The library comes from the
`nvidia-cublas` wheel (which nvmath-python and torch install) or a CUDA toolkit, else from the package that has loaded
its own copy. ``torch`` by name is torch's own ``torch.mm``.

Matrices are row-major and packed; cuBLAS, which is column-major, is asked for Cᵀ = Bᵀ·Aᵀ. FP32 is IEEE FP32: the
reduced-precision math modes stay off.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from numba_gemm.errors import NumbaGemmError

#: What ``--peer`` takes.
PEERS = ("auto", "none", "nvmath", "cupy", "torch")

REMEDY = "pip install 'numba-gemm[peers]' brings cuBLAS; CuPy or torch serve as well"

_WORKSPACE_BYTES = 32 * 1024 * 1024  # what cuBLAS recommends for Hopper; more than enough elsewhere
_CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF in library_types.h
_COMPUTE_32F, _ALGO_DEFAULT, _OP_N = 68, -1, 0  # enumerators in cublas_api.h


class PeerError(NumbaGemmError, RuntimeError):
    """A peer isn't installed, or its call failed."""


class Peer(Protocol):
    """Another implementation of the product.

    ``name`` stands in tables (``"cublas"``); ``version`` says which, for the record.
    """

    name: str
    version: str

    def gemm(self, a: int, b: int, c: int, m: int, n: int, k: int, stream: int) -> None:
        """C = A·B on device addresses of packed row-major matrices, asynchronously on ``stream``."""


class Cublas:
    """cuBLAS by its C interface, with one handle and one workspace of its own.

    Parameters
    ----------
    path : the library's file.
    dtype : element type of A, B and C.
    """

    name = "cublas"

    def __init__(self, path: str, dtype: str = "float32", *, source: str = "") -> None:
        from numba_gemm.device.context import current_context
        from numba_gemm.device.memory import DeviceBuffer
        from numba_gemm.device.stream import synchronize_stream

        current_context()
        self._library = ctypes.CDLL(path)
        self._handle = ctypes.c_void_p()
        self._check(self._library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        number = ctypes.c_int()
        self._check(self._library.cublasGetVersion_v2(self._handle, ctypes.byref(number)), "cublasGetVersion")
        self.version = f"cuBLAS {_version_text(number.value)}{f' ({source})' if source else ''}"
        # With a workspace of its own a captured call needs no allocation inside the graph.
        self._workspace = DeviceBuffer(_WORKSPACE_BYTES, 0)
        synchronize_stream(0)
        self._stream: int | None = None
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._type = _CUDA_TYPES[dtype]
        self._dtype = dtype

    def gemm(self, a: int, b: int, c: int, m: int, n: int, k: int, stream: int) -> None:
        """See :class:`Peer`."""
        if stream != self._stream:
            self._check(self._library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "cublasSetStream")
            # Setting the stream also puts the default workspace back.
            self._check(
                self._library.cublasSetWorkspace_v2(
                    self._handle, ctypes.c_void_p(self._workspace.pointer), ctypes.c_size_t(_WORKSPACE_BYTES)
                ),
                "cublasSetWorkspace",
            )
            self._stream = stream
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
        first, second, target = ctypes.c_void_p(b), ctypes.c_void_p(a), ctypes.c_void_p(c)
        if self._dtype == "float32":
            status = self._library.cublasSgemm_v2(
                self._handle, _OP_N, _OP_N, n, m, k, one, first, n, second, k, zero, target, n
            )
        else:
            kind = self._type
            status = self._library.cublasGemmEx(
                *(self._handle, _OP_N, _OP_N, n, m, k, one, first, kind, n, second, kind, k),
                *(zero, target, kind, n, _COMPUTE_32F, _ALGO_DEFAULT),
            )
        self._check(status, f"cuBLAS on {m}×{n}×{k}")

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status != 0:
            raise PeerError(f"{what} failed with cublasStatus_t {status}")


class Torch:
    """``torch.mm`` on tensors that view the given addresses."""

    name = "torch"

    def __init__(self, dtype: str = "float32") -> None:
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise PeerError("torch is installed without CUDA, or sees no GPU")
        self._torch.backends.cuda.matmul.allow_tf32 = False
        self._dtype = getattr(self._torch, dtype)
        self._itemsize = 4 if dtype == "float32" else 2
        self._tensors: dict[tuple[int, int, int], Any] = {}
        self._streams: dict[int, Any] = {}
        self.version = f"torch {self._torch.__version__}"

    def _tensor(self, pointer: int, rows: int, columns: int) -> Any:
        key = (pointer, rows, columns)
        if key not in self._tensors:
            integer = "<f4" if self._itemsize == 4 else "<i2"  # the interface has no bfloat16
            view = _DeviceView(pointer, (rows, columns), integer)
            self._tensors[key] = self._torch.as_tensor(view, device="cuda").view(self._dtype)
        return self._tensors[key]

    def gemm(self, a: int, b: int, c: int, m: int, n: int, k: int, stream: int) -> None:
        """See :class:`Peer`."""
        if stream not in self._streams:
            self._streams[stream] = self._torch.cuda.ExternalStream(stream)
        with self._torch.cuda.stream(self._streams[stream]):
            self._torch.mm(self._tensor(a, m, k), self._tensor(b, k, n), out=self._tensor(c, m, n))


class _DeviceView:
    """Device memory of someone else's, dressed as an array."""

    def __init__(self, pointer: int, shape: tuple[int, int], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": typestr,
            "shape": shape,
            "data": (pointer, False),
            "strides": None,
        }


def find_peer(choice: str = "auto", dtype: str = "float32") -> tuple[Peer | None, str]:
    """The peer asked for.

    Parameters
    ----------
    choice : one of :data:`PEERS`. ``"auto"`` takes cuBLAS from wherever it is found, ``"nvmath"`` and ``"cupy"`` the
        one that the package brings, ``"torch"`` ``torch.mm``.
    dtype : element type.

    Returns
    -------
    The peer, or None; and, if it is None though one was wanted, why, in words.

    Raises
    ------
    ValueError : for a name that isn't in :data:`PEERS`.
    PeerError : if a peer asked for by name can't be used.
    """
    if choice not in PEERS:
        raise ValueError(f"there is no peer {choice!r}; the peers are {', '.join(PEERS)}")
    if choice == "none":
        return None, ""
    reasons = []
    for name in _MAKERS if choice == "auto" else (choice,):
        try:
            return _MAKERS[name](dtype), ""
        except Exception as error:  # whatever an optional package does, the next one is tried
            reasons.append(f"{name}: {' '.join(str(error).split())[:200] or type(error).__name__}")
    reason = f"no cuBLAS to compare with ({'; '.join(reasons)}). {REMEDY}"
    if choice != "auto":
        raise PeerError(reason)
    return None, reason


def importable_peers() -> dict[str, bool]:
    """Which of the packages that bring cuBLAS are installed, without importing them."""
    return {name: importlib.util.find_spec(name) is not None for name in ("nvmath", "cupy", "torch")}


def find_cublas() -> str:
    """The path of libcublas from a wheel or a toolkit.

    Raises
    ------
    PeerError : if there is none.
    """
    pathfinder = importlib.import_module("cuda.pathfinder")
    try:
        found = pathfinder.load_nvidia_dynamic_lib("cublas").abs_path
    except Exception as error:
        raise PeerError(f"libcublas was not found ({type(error).__name__})") from error
    if not found:
        raise PeerError("libcublas was loaded from an unknown place")
    return str(found)


def loaded_library(name: str, maps: str | None = None) -> str | None:
    """The path of a shared library that this process has loaded, for instance of ``"libcublas.so"``."""
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text()
        except OSError:
            return None
    found = re.search(rf"\s(/\S*/{re.escape(name)}[.\d]*)$", maps, re.M)
    return found.group(1) if found else None


def _from_loader(dtype: str) -> Peer:
    return Cublas(find_cublas(), dtype)


def _from_nvmath(dtype: str) -> Peer:
    importlib.import_module("nvmath.bindings.cublas")
    return Cublas(find_cublas(), dtype, source="nvmath-python")


def _from_cupy(dtype: str) -> Peer:
    cupy = importlib.import_module("cupy")
    cupy.cuda.device.get_cublas_handle()  # makes CuPy load its library
    return Cublas(loaded_library("libcublas.so") or find_cublas(), dtype, source=f"CuPy {cupy.__version__}")


def _from_torch(dtype: str) -> Peer:
    return Torch(dtype)


_MAKERS: dict[str, Callable[[str], Peer]] = {
    "cublas": _from_loader,
    "nvmath": _from_nvmath,
    "cupy": _from_cupy,
    "torch": _from_torch,
}


def _version_text(number: int) -> str:
    """``130100`` → ``"13.1.0"`` (major·10000 + minor·100 + patch)."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
