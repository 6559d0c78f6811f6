"""Inline PTX of v8: shared memory by its 32-bit addresses, asynchronous copies into it, and whole fragments at once.

An address is a plain integer here: bytes in the shared window (uint32) or in global memory (int64). The constants
that are added to it end up in the instructions, so that a thread keeps one register for all the places it reads.

The functions with capitals in their row make an intrinsic for given sizes. Each stands for a run of lines, one for
each element of a thread's share, that Numba would take minutes to compile: it hands the compiler what a written-out
loop comes to, without the loop. ``values`` and ``accumulator`` are local arrays, indexed by constants alone, so that
they live in registers.

===============================================  =====================================================================
``shared_address(array)``                        where a shared array begins
``global_address(pointer)``                      where a pointer points
``copy_tile(STEPS_E, STEPS_K, …)``               this thread's ``cp.async`` of one stage of an operand
``copy_first_tile(STEPS_E, STEPS_K, …)``         the same with zeros where k is negative
``commit_copies()``                              ends a group of copies
``wait_copies(PENDING)``                         until at most so many groups of this thread's are under way; a barrier
                                                 then shows the data to the other threads
``load_fragment(GROUPS, DISTANCE)``              groups of four floats, ``ld.shared.v4.f32``, into a local array
``outer_product(ROWS, COLUMNS)``                 ``accumulator += a · bᵀ`` as FMAs
===============================================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from numba_gemm.compile.numba_source import intrinsic, ir, types

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOAT4 = ir.LiteralStructType([FLOAT] * 4)
_VOID = ir.VoidType()
UINT32_TYPE = types.uint32
INT64_TYPE = types.int64
FLOAT_TYPE = types.float32
#: Clobbers of instructions that must stay on their side of a barrier.
_MEMORY = "~{memory}"


class ThreadTile(NamedTuple):
    """Where a thread's outputs lie: the row of each accumulator row and the column of each accumulator column, counted
    from the thread's first."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def accesses(self, width: int) -> Iterator[tuple[int, int, int]]:
        """(accumulator row, index of the first of ``width`` accumulators, their first column)."""
        for i in range(len(self.rows)):
            for j in range(0, len(self.columns), width):
                yield i, i * len(self.columns) + j, self.columns[j]


class RowTile(NamedTuple):
    """How a warp's outputs pass through shared memory, to be stored row by row.

    Attributes
    ----------
    sums, together : accumulators of a thread, and how many of them pass at a time.
    put : bytes from the thread's first place to that of each four of them.
    get : bytes from the first place where it reads to that of each output that it then stores.
    places : (row, column) of these outputs, each time, from the warp's first row in column ``lane``.
    warps : warps that store, the block's first ones.
    """

    sums: int
    together: int
    put: tuple[int, ...]
    get: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    warps: int


def i32(value: int) -> Any:
    return ir.Constant(INT32, value)


def i64(value: int) -> Any:
    return ir.Constant(INT64, value)


def assembly(builder: Any, text: str, constraints: str, args: list[Any], result: Any = _VOID) -> Any:
    """A PTX instruction; volatile, and no memory access moves across it."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    given = ",".join(part for part in (constraints, _MEMORY) if part)
    return builder.call(ir.InlineAsm(function_type, text, given, side_effect=True), args)


class LocalArray:
    """A Numba local array of float32 or int64, read and written at constant or LLVM indices."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any) -> None:
        self._builder = builder
        self._data = context.make_array(array_type)(context, builder, value=array).data

    def _place(self, index: Any) -> Any:
        return self._builder.gep(self._data, [i32(index) if isinstance(index, int) else index])

    def __getitem__(self, index: Any) -> Any:
        return self._builder.load(self._place(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._builder.store(value, self._place(index))


def shared_load(builder: Any, address: Any, offset: int) -> list[Any]:
    text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    four = assembly(builder, text, "=f,=f,=f,=f,r", [address], FLOAT4)
    return [builder.extract_value(four, i) for i in range(4)]


@intrinsic
def shared_address(typingctx: Any, array: Any) -> Any:
    """The 32-bit shared-window address of a shared array, in bytes."""
    signature = UINT32_TYPE(array)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        window = builder.addrspacecast(data, data.type.pointee.as_pointer(3))
        return builder.ptrtoint(window, INT32)

    return signature, codegen


@intrinsic
def global_address(typingctx: Any, pointer: Any) -> Any:
    """The 64-bit address that a pointer holds, in bytes."""
    signature = INT64_TYPE(pointer)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], INT64)

    return signature, codegen


@intrinsic
def thread_again(typingctx: Any) -> Any:
    """The thread's number in its block, read here: nothing that follows from it is kept in registers before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return assembly(builder, "mov.u32 $0, %tid.x;", "=r", [], INT32)

    return UINT32_TYPE(), codegen


# --- copies of a tile


class Steps(NamedTuple):
    """A thread's copies of one stage of an operand: ``steps_e`` · ``steps_k`` of ``width`` floats.

    Copy (e, k) belongs at ``e · e_bytes + k · k_bytes`` from the thread's first place in the tile, with ``row_bytes``
    between the floats of a copy that is put in place word by word. They are ``k_step`` elements of k apart.
    """

    width: int
    steps_e: int
    steps_k: int
    e_bytes: int
    k_bytes: int
    k_step: int
    row_bytes: int

    def part(self, part: int, parts: int) -> Iterator[tuple[int, int, int, int]]:
        """(number, e, k, offset in the tile) of the copies of one of ``parts`` parts."""
        count = self.steps_e * self.steps_k
        for number in range(-(-count * part // parts), -(-count * (part + 1) // parts)):
            e, k = divmod(number, self.steps_k)
            yield number, e, k, e * self.e_bytes + k * self.k_bytes


def _chosen(builder: Any, steps: Steps, part: Any, parts: int) -> Iterator[tuple[int, int, int, int]]:
    """The copies of the part, a constant once the loop round it is unrolled; all of them if it is ``parts``."""
    for value in range(parts + 1):
        with builder.if_then(builder.icmp_unsigned("==", part, i32(value))):
            yield from steps.part(value, parts) if value < parts else steps.part(0, 1)


def _operation(width: int) -> tuple[str, int]:
    """16-byte copies pass the first-level cache by (``cg``); narrower ones can't."""
    return ("cp.async.cg.shared.global", 16) if width == 4 else ("cp.async.ca.shared.global", 4)


def copy_tile(steps: Steps, parts: int) -> Any:
    """An intrinsic ``(target, sources, step, on, part)``: asynchronous copies of one stage, if ``on`` isn't 0.

    ``sources`` has the address of the next copy for each e, and is moved on by ``step`` bytes after each k. ``part``
    says which part of the copies to start; ``parts`` means all.
    """
    operation, size = _operation(steps.width)
    text = f"{{ .reg .pred %on; setp.ne.u32 %on, $2, 0; @%on {operation} [$0+OFFSET], [$1], {size}; }}"

    @intrinsic
    def copy(typingctx: Any, target: Any, sources: Any, step: Any, on: Any, part: Any) -> Any:
        signature = types.void(UINT32_TYPE, sources, INT64_TYPE, UINT32_TYPE, UINT32_TYPE)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, array, step, on, part = args
            sources = LocalArray(context, builder, signature.args[1], array)
            for _, e, _, offset in _chosen(builder, steps, part, parts):
                assembly(builder, text.replace("OFFSET", str(offset)), "r,l,r", [target, sources[e], on])
                sources[e] = builder.add(sources[e], step)
            return context.get_dummy_value()

        return signature, codegen

    return copy


def copy_first_tile(steps: Steps) -> Any:
    """An intrinsic ``(target, sources, step, k)``: the same for a tile whose first rows may lie before k = 0.

    ``k`` (int64) is that of this thread's first copy; where it is negative nothing is read and the tile gets zeros.
    """
    operation, size = _operation(steps.width)

    @intrinsic
    def copy(typingctx: Any, target: Any, sources: Any, step: Any, k: Any) -> Any:
        signature = types.void(UINT32_TYPE, sources, INT64_TYPE, INT64_TYPE)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, array, step, first_k = args
            sources = LocalArray(context, builder, signature.args[1], array)
            for _, e, step_k, offset in steps.part(0, 1):
                inside = builder.icmp_signed(">=", first_k, i64(-step_k * steps.k_step))
                read = builder.select(inside, i32(size), i32(0))
                text = f"{operation} [$0+{offset}], [$1], {size}, $2;"
                assembly(builder, text, "r,l,r", [target, sources[e], read])
                sources[e] = builder.add(sources[e], step)
            return context.get_dummy_value()

        return signature, codegen

    return copy


FETCH = {
    4: (
        "{ .reg .pred %on; setp.ne.u32 %on, $5, 0; @%on ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; }",
        "=f,=f,=f,=f,l,r,0,1,2,3",
    ),
    1: ("{ .reg .pred %on; setp.ne.u32 %on, $2, 0; @%on ld.global.nc.f32 $0, [$1]; }", "=f,l,r,0"),
}


def _fetch(builder: Any, width: int, values: LocalArray, at: int, address: Any, on: Any) -> None:
    """``width`` floats from global memory into ``values[at …]``, which keep what they have if ``on`` is 0."""
    text, constraints = FETCH[width]
    old = [values[at + i] for i in range(width)]
    got = assembly(builder, text, constraints, [address, on, *old], FLOAT4 if width == 4 else FLOAT)
    for i in range(width):
        values[at + i] = builder.extract_value(got, i) if width == 4 else got


def fetch_tile(steps: Steps) -> Any:
    """An intrinsic ``(sources, step, on, staged)``: as :func:`copy_tile`, but into the local array ``staged``."""

    @intrinsic
    def fetch(typingctx: Any, sources: Any, step: Any, on: Any, staged: Any) -> Any:
        signature = types.void(sources, INT64_TYPE, UINT32_TYPE, staged)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sources = LocalArray(context, builder, signature.args[0], args[0])
            staged = LocalArray(context, builder, signature.args[3], args[3])
            for number, e, _, _ in steps.part(0, 1):
                _fetch(builder, steps.width, staged, number * steps.width, sources[e], args[2])
                sources[e] = builder.add(sources[e], args[1])
            return context.get_dummy_value()

        return signature, codegen

    return fetch


def fetch_first_tile(steps: Steps) -> Any:
    """An intrinsic ``(sources, step, k, staged)``: as :func:`copy_first_tile`, but into ``staged``."""

    @intrinsic
    def fetch(typingctx: Any, sources: Any, step: Any, k: Any, staged: Any) -> Any:
        signature = types.void(sources, INT64_TYPE, INT64_TYPE, staged)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sources = LocalArray(context, builder, signature.args[0], args[0])
            staged = LocalArray(context, builder, signature.args[3], args[3])
            for number, e, step_k, _ in steps.part(0, 1):
                for i in range(steps.width):
                    staged[number * steps.width + i] = ir.Constant(FLOAT, 0.0)
                on = builder.zext(builder.icmp_signed(">=", args[2], i64(-step_k * steps.k_step)), INT32)
                _fetch(builder, steps.width, staged, number * steps.width, sources[e], on)
                sources[e] = builder.add(sources[e], args[1])
            return context.get_dummy_value()

        return signature, codegen

    return fetch


def put_tile(steps: Steps, parts: int) -> Any:
    """An intrinsic ``(target, staged, part)``: what was fetched to its places in the tile."""

    @intrinsic
    def put(typingctx: Any, target: Any, staged: Any, part: Any) -> Any:
        signature = types.void(UINT32_TYPE, staged, UINT32_TYPE)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            staged = LocalArray(context, builder, signature.args[1], args[1])
            for number, _, _, offset in _chosen(builder, steps, args[2], parts):
                for i in range(steps.width):
                    text = f"st.shared.f32 [$0+{offset + i * steps.row_bytes}], $1;"
                    assembly(builder, text, "r,f", [args[0], staged[number * steps.width + i]])
            return context.get_dummy_value()

        return signature, codegen

    return put


def _bare(text: str) -> Any:
    @intrinsic
    def emit(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            assembly(builder, text, "", [])
            return context.get_dummy_value()

        return types.void(), codegen

    return emit


#: ``()``: end a group of asynchronous copies; an empty one is a group too.
commit_copies = _bare("cp.async.commit_group;")


def wait_copies(pending: int) -> Any:
    """An intrinsic ``()``: wait until at most ``pending`` groups of this thread's copies are under way."""
    return _bare(f"cp.async.wait_group {pending};")


# --- fragments


def load_fragment(groups: int, distance: int) -> Any:
    """An intrinsic ``(values, at, address)``: groups of four floats from shared memory into a local array.

    Group ``g`` is read from ``address + g · distance`` bytes and lands at ``values[at + 4·g]`` (flat).
    """

    @intrinsic
    def load(typingctx: Any, values: Any, at: Any, address: Any) -> Any:
        signature = types.void(values, UINT32_TYPE, UINT32_TYPE)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array, at, address = args
            values = LocalArray(context, builder, signature.args[0], array)
            for g in range(groups):
                for i, value in enumerate(shared_load(builder, address, g * distance)):
                    values[builder.add(at, i32(4 * g + i))] = value
            return context.get_dummy_value()

        return signature, codegen

    return load


def serpentine(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(row, column) of each FMA of an outer product, along the longer side and back and forth along the shorter one.

    Each FMA shares a factor with the one before it, which the assembler keeps in an operand cache, and so reads two
    registers instead of three. The register file delivers one from each of its two banks in a cycle.
    """
    by_rows = rows >= columns
    outer, inner = (rows, columns) if by_rows else (columns, rows)
    for x in range(outer):
        for y in range(inner) if x % 2 == 0 else reversed(range(inner)):
            yield (x, y) if by_rows else (y, x)


def outer_product(rows: int, columns: int) -> Any:
    """An intrinsic ``(accumulator, a, a_at, b, b_at)``: accumulator[i, j] += a[a_at + i] · b[b_at + j], as FMAs."""

    @intrinsic
    def multiply(typingctx: Any, accumulator: Any, a: Any, a_at: Any, b: Any, b_at: Any) -> Any:
        signature = types.void(accumulator, a, UINT32_TYPE, b, UINT32_TYPE)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, a, b = (LocalArray(context, builder, signature.args[i], args[i]) for i in (0, 1, 3))
            left = [a[builder.add(args[2], i32(i))] for i in range(rows)]
            right = [b[builder.add(args[4], i32(j))] for j in range(columns)]
            for i, j in serpentine(rows, columns):
                sums[i * columns + j] = builder.fma(left[i], right[j], sums[i * columns + j])
            return context.get_dummy_value()

        return signature, codegen

    return multiply


__all__ = [
    "FETCH",
    "FLOAT",
    "FLOAT4",
    "FLOAT_TYPE",
    "INT32",
    "INT64",
    "INT64_TYPE",
    "UINT32_TYPE",
    "LocalArray",
    "RowTile",
    "Steps",
    "ThreadTile",
    "assembly",
    "commit_copies",
    "copy_first_tile",
    "copy_tile",
    "fetch_first_tile",
    "fetch_tile",
    "global_address",
    "i32",
    "i64",
    "load_fragment",
    "outer_product",
    "put_tile",
    "serpentine",
    "shared_address",
    "shared_load",
    "thread_again",
    "wait_copies",
]
