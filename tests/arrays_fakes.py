"""Arrays that only say that they are on a GPU, and stand-ins of CuPy, torch and the driver, for tests without one."""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace

import numpy as np

from numba_gemm.arrays import dlpack


class CudaInterface:
    """A ``__cuda_array_interface__`` and nothing else."""

    def __init__(self, shape, *, pointer=1 << 20, typestr="<f4", strides=None, readonly=False, **more):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "data": (pointer, readonly),
            **more,
        }


#: The same as Numba's own class of arrays.
FakeNumbaArray = type("DeviceNDArray", (CudaInterface,), {"__module__": "numba.cuda.cudadrv.devicearray"})


class DLPackOnly:
    """A NumPy array exported through DLPack as if it were a GPU's; ``calls`` are the options of each export."""

    def __init__(self, array, *, device=(dlpack.CUDA, 0), versions=True):
        self.array = array
        self.device = device
        self.versions = versions
        self.calls = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if not self.versions and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.calls.append(options)
        capsule = self.array.__dlpack__(**{k: v for k, v in options.items() if k == "max_version"})
        tensor = tensor_of(capsule)
        tensor.device.type, tensor.device.ordinal = self.device
        return capsule


def tensor_of(capsule):
    """The C struct in a capsule, to be changed by a test."""
    for name, kind in ((b"dltensor_versioned", dlpack._ManagedVersioned), (b"dltensor", dlpack._Managed)):
        if dlpack._python.PyCapsule_IsValid(capsule, name):
            return kind.from_address(dlpack._python.PyCapsule_GetPointer(capsule, name)).tensor
    raise AssertionError(capsule)


def counted_capsule(data, shape, *, versioned, strides=None, flags=0, code=2, bits=32, lanes=1, offset=0, major=1):
    """A capsule made by hand, and the list that its destructor appends to."""
    kind = dlpack._ManagedVersioned if versioned else dlpack._Managed
    name = b"dltensor_versioned" if versioned else b"dltensor"
    managed = kind()
    tensor = managed.tensor
    tensor.data, tensor.ndim, tensor.byte_offset = data, len(shape), offset
    tensor.device.type, tensor.device.ordinal = dlpack.CUDA, 3
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, lanes
    extents = (ctypes.c_int64 * len(shape))(*shape)
    tensor.shape = ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    steps = None
    if strides is not None:
        steps = (ctypes.c_int64 * len(strides))(*strides)
        tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    if versioned:
        managed.major, managed.minor, managed.flags = major, 0, flags
    dropped = []
    destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(lambda _: dropped.append(name))
    new = ctypes.PyDLL(None).PyCapsule_New
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
    capsule = new(ctypes.addressof(managed), name, ctypes.cast(destructor, ctypes.c_void_p))
    dropped_by = (dropped, managed, extents, steps, destructor, name)  # all must outlive the capsule
    return capsule, dropped_by


def fake_cupy(stream=0, device=0, version=14):
    """A module that looks like CuPy with one current stream; ``made`` are the streams of each new array."""
    cupy = ModuleType("cupy")
    current = [stream]
    made = []

    class Scope:
        def __init__(self, ptr=None):
            self.ptr = ptr

        def __enter__(self):
            if self.ptr is not None:
                current.append(self.ptr)

        def __exit__(self, *_):
            if self.ptr is not None:
                current.pop()

    class ndarray:  # noqa: N801 - CuPy's name
        def __init__(self, shape, dtype="f4", strides=None, ptr=1 << 30):
            host = np.empty(shape, dtype)
            self.shape, self.dtype, self.itemsize = shape, host.dtype, host.itemsize
            self.strides = strides or host.strides
            self.data = SimpleNamespace(ptr=ptr, device_id=device)

    ndarray.__module__ = "cupy"

    def empty(shape, dtype):
        made.append(current[-1])
        return ndarray(shape, dtype)

    cupy.ndarray, cupy.empty, cupy.made = ndarray, empty, made
    cupy.cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(ptr=current[-1]),
        runtime=SimpleNamespace(getDevice=lambda: 0),
        Device=lambda ordinal: Scope(),
        ExternalStream=Scope,
        Stream=SimpleNamespace(null=Scope(0)),
    )
    if version >= 14:
        cupy.cuda.Stream.from_external = lambda foreign: Scope(foreign.__cuda_stream__()[1])
    return cupy


def fake_torch(stream=0):
    """A module that looks like torch with CUDA; ``made`` are the streams of each new tensor."""
    torch = ModuleType("torch")
    current = [stream]
    made = []

    class Tensor:
        requires_grad = is_quantized = False
        layout = "strided"

        def __init__(self, shape, dtype="float32", *, device="cuda", strides=None, pointer=1 << 30, **flags):
            self.shape, self.dtype = shape, f"torch.{dtype}"
            self.device = SimpleNamespace(type=device, index=0)
            self._strides = strides or dlpack.packed_strides(shape)
            self._pointer = pointer
            self._flags = flags
            for name in ("requires_grad", "layout", "is_quantized"):
                setattr(self, name, flags.get(name, getattr(self, name)))

        def is_conj(self):
            return self._flags.get("conj", False)

        def is_neg(self):
            return self._flags.get("neg", False)

        def stride(self):
            if self.layout != "strided":
                raise RuntimeError("Sparse tensors do not have strides")
            return self._strides

        def data_ptr(self):
            if self._pointer is None:
                raise RuntimeError("Cannot access data pointer of Tensor")
            return self._pointer

        def get_device(self):
            return self.device.index if self.device.type == "cuda" else -1

        def element_size(self):
            return 2 if self.dtype.endswith("16") else 4

    Tensor.__module__ = "torch"

    class Scope:
        def __init__(self, handle):
            self.handle = handle

        def __enter__(self):
            current.append(self.handle)

        def __exit__(self, *_):
            current.pop()

    def empty(shape, dtype, device):
        made.append(current[-1])
        return Tensor(shape, dtype)

    torch.Tensor, torch.empty, torch.made = Tensor, empty, made
    torch.strided = "strided"
    torch.float32, torch.bfloat16 = "float32", "bfloat16"
    torch.nn = SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}))
    torch.version = SimpleNamespace(cuda="13.0")
    torch.is_grad_enabled = lambda: True
    torch.device = lambda kind, index: (kind, index)
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: current[-1])
    torch.cuda = SimpleNamespace(
        ExternalStream=lambda handle, device: handle, default_stream=lambda device: 0, stream=Scope
    )
    return torch


class FakeDriver:
    """What :mod:`numba_gemm.device.pointer` and ``lifetime`` ask of the driver.

    ``memory`` : address → (CUmemorytype, managed, ordinal, context); ``streams`` : handle → context. A context's
    identity is its number plus 100. ``pending`` are the streams with unfinished work.
    """

    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2,
        CU_POINTER_ATTRIBUTE_IS_MANAGED=9,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=10,
        CU_POINTER_ATTRIBUTE_CONTEXT=1,
    )
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)

    def __init__(self, memory=None, streams=None, *, capturing=False):
        self.memory = memory or {}
        self.streams = streams or {}
        self.capturing = capturing
        self.pending = set()
        self.events = {}
        self.destroyed = []

    def cuPointerGetAttributes(self, count, attributes, address):  # noqa: N802
        assert count == len(attributes) == 4
        return 0, list(self.memory.get(address, (0, False, 0, 0)))

    def cuCtxGetId(self, context):  # noqa: N802
        return 0, context + 100

    def cuStreamGetCtx(self, stream):  # noqa: N802
        return (0, self.streams[stream]) if stream in self.streams else (400, None)

    def cuStreamIsCapturing(self, stream):  # noqa: N802
        return 0, int(self.capturing)

    def cuEventCreate(self, flags):  # noqa: N802
        assert flags == 2, "a timed event costs more to record"
        event = object()
        self.events[event] = None
        return 0, event

    def cuEventRecord(self, event, stream):  # noqa: N802
        self.events[event] = stream
        return (0,)

    def cuEventQuery(self, event):  # noqa: N802
        return (600 if self.events[event] in self.pending else 0,)

    def cuEventDestroy(self, event):  # noqa: N802
        self.destroyed.append(event)
        return (0,)
