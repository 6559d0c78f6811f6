"""Products of device arrays: checked and arranged once, then repeated.

A call on device arrays first looks for one like it (:func:`repeat_call`): the same shapes, strides, dtypes, alignment
and options in the same context. What two such calls can differ in, the addresses and the stream, is then all that is
checked. A plan (``plans.py``) is the same without the search.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

from numba_gemm.arrange import Scales, request_for
from numba_gemm.arrays import Operand, hold_operands, probe_for
from numba_gemm.device.context import Context, current_context, device_count
from numba_gemm.device.launch import quick_driver_function
from numba_gemm.device.pointer import check_device_operands
from numba_gemm.device.repeat import LEGACY_STREAM, find_graph, load_replay
from numba_gemm.device.stream import Event, wait_event
from numba_gemm.execute import Prepared, prepare_request
from numba_gemm.problem import ALIGNMENT
from numba_gemm.stack import ProductShape

#: Calls that are known again at once; when there are more, all are forgotten.
_CALLS_LIMIT = 4096


class Call:
    """A checked product of device arrays, ready for other addresses of the same alignment."""

    __slots__ = ("_recent", "context", "extents", "prepared", "run")

    def __init__(
        self, a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales, context: Context
    ) -> None:
        self.prepared: Prepared = prepare_request(request_for(a, b, c, shape, scales), context)
        self.context = context.identity
        self.run: Callable[[int, int, int, int], None] = self.prepared.direct or self.prepared.launch
        # First and past-the-last byte of A, B and C, relative to their pointers.
        self.extents = tuple(end - operand.pointer for operand in (a, b, c) for end in operand.byte_range())
        self._recent = (a.pointer, b.pointer, c.pointer)

    def repeat(self, a: int, b: int, c: int, stream: int) -> bool:
        """Launch on these addresses; False, with nothing done, if the full checks are needed to say what is wrong."""
        if current_identity() != self.context:
            return False
        pointers = (a, b, c)
        if pointers != self._recent:
            a_low, a_high, b_low, b_high, c_low, c_high = self.extents
            c_low += c
            c_high += c
            if (c_low < a + a_high and a + a_low < c_high) or (c_low < b + b_high and b + b_low < c_high):
                return False
            self._recent = pointers
        self.run(a, b, c, stream)
        return True


def multiply_device(
    a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales, stream: int | None
) -> Call:
    """C = alpha · A · B + beta · C on device arrays, asynchronously; C has an element at least.

    Runs on ``stream``, else on the stream of the arrays, after the work on the others'.
    """
    context = current_context()
    chosen = common_stream(a, b, c) if stream is None else stream
    check_device_operands((a, b, c), context, chosen)
    call = Call(a, b, c, shape, scales, context)
    if stream is None:
        _join((a, b, c), chosen)
    call.prepared.launch(a.pointer, b.pointer, c.pointer, chosen)
    hold_operands((a, b, c), chosen)
    return call


def prepare_device(a: Operand, b: Operand, c: Operand, shape: ProductShape, scales: Scales) -> Prepared:
    """What :func:`multiply_device` would launch, compiled and loaded."""
    context = current_context()
    check_device_operands((a, b, c), context, common_stream(a, b, c))
    return prepare_request(request_for(a, b, c, shape, scales), context)


def common_stream(*operands: Operand) -> int:
    """The stream to launch on: the output's, else the first that an input names, else the legacy default stream, 0."""
    named = [operand.stream for operand in (operands[-1], *operands) if operand.stream is not None]
    return named[0] if named else 0


def _join(operands: tuple[Operand, ...], stream: int) -> None:
    """Order ``stream`` after the work on the operands' other streams, without stopping the host."""
    for other in {operand.stream for operand in operands if operand.stream is not None} - {stream}:
        event = Event()
        event.record(other)
        wait_event(stream, event)


class _Identity(threading.local):
    def __init__(self) -> None:
        value = ctypes.c_ulonglong(0)
        self.parts = (value, ctypes.addressof(value))


_identity = _Identity()
_get_context_id: Callable[..., int] | None = None


def current_identity() -> int:
    """The identity of the context that is current in this thread; 0 if none is."""
    value, address = _identity.parts
    return 0 if (_get_context_id or _load_get_context_id())(None, address) else value.value


def _load_get_context_id() -> Callable[..., int]:
    global _get_context_id  # noqa: PLW0603 - found once a process
    _get_context_id = quick_driver_function("cuCtxGetId", ctypes.c_void_p, ctypes.c_void_p)
    return _get_context_id


_calls: dict[tuple[Any, ...], Call] = {}


def repeat_call(a: Any, b: Any, c: Any, options: tuple[Any, ...], stream: int | None) -> tuple[Any, ...] | None:
    """Launch a product of device arrays at once if one like it was checked and launched before.

    Returns
    -------
    None if that was done; else, with nothing done, the key under which :func:`remember` should keep the call that the
    full checks make (an empty one if it can't be kept).
    """
    a_probe, b_probe, c_probe = probe_for(a), probe_for(b), probe_for(c)
    if a_probe is None or b_probe is None or c_probe is None:
        return ()
    try:
        a_pointer, a_shape, a_strides, a_dtype, a_stream = a_probe(a)
        b_pointer, b_shape, b_strides, b_dtype, b_stream = b_probe(b)
        c_pointer, c_shape, c_strides, c_dtype, c_stream = c_probe(c)
        key = (
            a_shape, a_strides, a_dtype, a_pointer % ALIGNMENT,
            b_shape, b_strides, b_dtype, b_pointer % ALIGNMENT,
            c_shape, c_strides, c_dtype, c_pointer % ALIGNMENT,
            options,
        )  # fmt: skip
        call = _calls.get(key)
    except (AttributeError, TypeError, ValueError):  # no array after all, or an option that can't be looked up
        return ()
    if call is None:
        return key
    if not a_stream == b_stream == c_stream or (stream is not None and stream != c_stream):
        return key
    return None if call.repeat(a_pointer, b_pointer, c_pointer, c_stream) else key


def remember(key: tuple[Any, ...], call: Call) -> None:
    """Keep a call for :func:`repeat_call`; not with several GPUs, where an address doesn't say which it is on."""
    if key and not several_gpus():
        if len(_calls) >= _CALLS_LIMIT:
            _calls.clear()
        _calls[key] = call


@functools.cache
def several_gpus() -> bool:
    """Whether an address alone doesn't say that it is on the current GPU."""
    return device_count() > 1


#: Launches a plan's product on arrays of the types that it knows, if nothing else differs; else False.
Fast = Callable[[Any, Any, Any], bool]


def make_fast(arrays: tuple[Any, Any, Any], call: Call) -> Fast | None:
    """The shortest way to repeat a call, for arrays of these exact types on their own stream; None if there is none.

    It looks at all that can differ: types, shapes, strides, dtypes, addresses (alignment, overlap), streams, context.
    """
    probes = [probe_for(array) for array in arrays]
    if several_gpus() or None in probes:
        return None
    a_probe, b_probe, c_probe = probes
    a_type, b_type, c_type = (type(array) for array in arrays)
    a_form, b_form, c_form = (probe(array)[1:4] for probe, array in zip(probes, arrays, strict=True))  # type: ignore[misc]
    a_offset, b_offset, c_offset = (probe(x)[0] % ALIGNMENT for probe, x in zip(probes, arrays, strict=True))  # type: ignore[misc]
    a_low, a_high, b_low, b_high, c_low, c_high = call.extents
    run, context = call.run, call.context
    get_identity, identity = _get_context_id or _load_get_context_id(), _identity
    recent: tuple[int, int, int] = (0, 0, 0)
    number = call.prepared.repeats[1] if call.prepared.direct and call.prepared.repeats else None
    known, replay = find_graph, load_replay()
    # Of launches on the default stream that are repeated: what the probes said last, and the key of the graph.
    last: tuple[Any, Any, Any, Any] = (None, None, None, None)

    def fast(a: Any, b: Any, c: Any) -> bool:
        nonlocal recent, last
        if type(a) is not a_type or type(b) is not b_type or type(c) is not c_type:
            return False
        a_seen, b_seen, c_seen = a_probe(a), b_probe(b), c_probe(c)  # type: ignore[misc]
        value, address = identity.parts  # current_identity(), without a call
        if get_identity(None, address) or value.value != context:
            return False
        a_last, b_last, c_last, key = last
        if a_seen == a_last and b_seen == b_last and c_seen == c_last and key[1] == get_ident():
            graph = known(key)
            if graph is not None and not replay(graph.handle, LEGACY_STREAM):
                return True
        stream = c_seen[4]
        if a_seen[1:4] != a_form or b_seen[1:4] != b_form or c_seen[1:4] != c_form:
            return False
        if a_seen[4] != stream or b_seen[4] != stream:
            return False
        pointers = a_at, b_at, c_at = a_seen[0], b_seen[0], c_seen[0]
        if pointers != recent:
            if a_at % ALIGNMENT != a_offset or b_at % ALIGNMENT != b_offset or c_at % ALIGNMENT != c_offset:
                return False
            low, high = c_at + c_low, c_at + c_high
            if (low < a_at + a_high and a_at + a_low < high) or (low < b_at + b_high and b_at + b_low < high):
                return False
            recent = pointers
        elif stream == LEGACY_STREAM and number is not None:
            last = a_seen, b_seen, c_seen, (number, get_ident(), *pointers, stream)
        run(a_at, b_at, c_at, stream)
        return True

    return fast
