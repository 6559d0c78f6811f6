"""The products on which the tensor-core kernels of a GPU and of the emulator are compared bit for bit.

Every input comes from the raw 64-bit output of NumPy's PCG64, whose stream is fixed, by integer operations alone, so
that the hash of a GPU's output can be checked long after, under any NumPy version. A product is placed in memory here,
column-major factors too, and the form of the kernel is chosen here, as an H200 would: so both run the same text on the
same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from config_words import described
from images import Image
from numpy.typing import NDArray

from numba_gemm.arrays.operand import numpy_dtype
from numba_gemm.catalog import get_spec
from numba_gemm.choose import choose
from numba_gemm.emulate import run_form
from numba_gemm.emulator.machine import Machine
from numba_gemm.problem import ALIGNMENT, Problem
from numba_gemm.spec import Addresses, Config, KernelSpec, describe_config, make_config

SEED = 21
ARCH, SM_COUNT = (9, 0), 132  # an H200

#: Exponent bias and mantissa bits.
FORMATS = {"float16": (15, 10), "bfloat16": (127, 7), "float32": (127, 23)}

#: Exponents that a kind of input draws from; those below the lowest of a type make subnormal numbers.
EXPONENTS = {
    "random": np.array([1, 0, 0, 0, -1, -1, -1, -1, -2, -2, -3, -3, -4, -5, -6, -8]),
    "wide": np.arange(-14, 9),
    "subnormal": np.array([0, -6, -10, -12, -13, -14, -14, -15, -15, -15, -126, -127]),
    "special": np.array([1, 0, 0, -1, -1, -2, -3, -5]),
}

#: Tiles of w2 that small products don't get.
W2_TILES = ("128x256x64", "128x256x64 2x1", "192x128x64", "128x128x64", "64x256x64 2x1")

TYPES = [("float16", "float16"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


@dataclass(frozen=True)
class HalfCase:
    """C = alpha · A @ B + beta · C; ``gap`` elements between rows or columns, ``offset`` elements before the first."""

    m: int
    n: int
    k: int
    dtype: str = "float16"
    c_dtype: str = "float16"
    inputs: str = "random"
    alpha: float = 1.0
    beta: float = 0.0
    layouts: str = "row/row"
    gap: int = 0
    offset: int = 0
    form: str = ""  # of a form to force, the tile, and "tma" if TMA copies it

    def __str__(self) -> str:
        parts = [f"{self.m}×{self.n}×{self.k} {self.dtype}→{self.c_dtype} {self.inputs} {self.layouts}"]
        parts += [f"gap={self.gap} offset={self.offset}"] if self.gap or self.offset else []
        parts += [f"alpha={self.alpha:g} beta={self.beta:g}"] if (self.alpha, self.beta) != (1.0, 0.0) else []
        return " ".join([*parts, self.form]).strip()


def cases(kernel: str) -> Iterator[HalfCase]:
    """The products for one kernel."""
    for dtype, c_dtype in TYPES:
        base = HalfCase(1, 1, 1, dtype, c_dtype)
        scaled = {"alpha": 0.75, "beta": -1.25}
        yield base
        yield replace(base, m=33, n=40, k=1)
        yield replace(base, m=17, n=19, k=23)
        yield replace(base, m=129, n=136, k=72)
        yield replace(base, m=131, n=133, k=53, gap=3, offset=1, **scaled)
        yield replace(base, m=72, n=64, k=40, gap=8, **scaled)
        yield replace(base, m=66, n=130, k=64, inputs="wide", alpha=-3.0)
        yield replace(base, m=40, n=48, k=39, inputs="subnormal", beta=0.5)
        yield replace(base, m=48, n=40, k=32, inputs="special")
        if kernel in ("w1", "w2") and dtype == c_dtype:
            for layouts in ("column/row", "row/column", "column/column"):
                yield replace(base, m=136, n=72, k=88, layouts=layouts)
        if kernel == "w2":
            yield replace(base, m=64, n=72, k=4096)  # split
            if dtype == c_dtype:
                yield replace(base, m=5, n=200, k=136, form="columns", **scaled)  # the transposed product
                for tile in W2_TILES if dtype == "bfloat16" else W2_TILES[1::2]:
                    block_m, block_n, _ = map(int, tile.split()[0].split("x"))
                    yield replace(base, m=block_m + 5, n=block_n + 8, k=216, form=tile)
        if kernel != "t4":
            continue
        yield replace(base, m=64, n=72, k=2048)  # these split K
        yield replace(base, m=33, n=35, k=1301, **scaled)
        if (dtype == "float16") == (c_dtype == "float16"):
            for layouts in ("column/row", "row/column", "column/column"):
                yield replace(base, m=136, n=72, k=88, layouts=layouts)
                yield replace(base, m=67, n=70, k=45, layouts=layouts, gap=1, **scaled)
        if dtype == c_dtype:
            for tile in dict.fromkeys(form_of(get_spec("t4"), config) for config in get_spec("t4").configs):
                block_m, block_n, block_k = map(int, tile.split()[0].split("x"))
                yield replace(base, m=block_m + 5, n=block_n + 8, k=3 * block_k + 24, form=tile)
        # Rows that TMA copies begin on 16 bytes; the same products by both forms.
        for form in ("128x256x64", "128x256x64 tma"):
            odd = replace(base, m=131, n=261, k=197, gap=3, form=form)
            if form.endswith("tma"):
                yield replace(odd, inputs="special")
                yield replace(odd, inputs="wide", **scaled)
            if (dtype == "float16") == (c_dtype == "float16"):
                yield replace(base, m=136, n=264, k=328, layouts="column/column", form=form, **scaled)
                yield replace(base, m=136, n=72, k=88, layouts="row/column", form=form)


def form_of(spec: KernelSpec, config: Config) -> str:
    """The tile of a form, with "tma" if TMA copies those of t4, and "2x1" if w2 shares them in such a cluster."""
    tile = "x".join(map(str, spec.geometry(config).block_tile))
    values = dict(config)
    cluster = f"{values.get('cluster_m', 1)}x{values.get('cluster_n', 1)}"
    return f"{tile} tma" if values.get("copies") == "tma" else tile + (f" {cluster}" if cluster != "1x1" else "")


def place(case: HalfCase, which: int, *, poison: bool = False) -> Image:
    """A, B or C (0, 1, 2) of a case in memory; ``poison`` leaves NaNs in place of the values."""
    shape = ((case.m, case.k), (case.k, case.n), (case.m, case.n))[which]
    layout = (*case.layouts.split("/"), "row")[which]
    values = fill(case, which, shape)
    lines, length = shape if layout == "row" else shape[::-1]
    leading = length + case.gap
    flat = np.full(case.offset + (lines - 1) * leading + length, np.nan, values.dtype)
    image = Image(flat, shape, case.offset, leading, layout)
    if not poison:
        image.view(flat)[...] = values
    return image


def fill(case: HalfCase, which: int, shape: tuple[int, int]) -> NDArray[Any]:
    rows, columns = shape
    dtype = case.c_dtype if which == 2 else case.dtype
    bias, mantissa = FORMATS[dtype]
    source = np.random.PCG64([SEED, case.m, case.n, case.k, which])
    words: NDArray[np.uint64] = source.random_raw(rows * columns).reshape(shape)
    exponents = EXPONENTS[case.inputs]
    chosen = exponents[((words >> np.uint64(40)) % np.uint64(exponents.size)).astype(np.int64)]
    encoded = np.clip(chosen + bias, 0, 2 * bias).astype(np.uint64)
    exponent_bits = 5 if dtype == "float16" else 8
    bits = (words >> np.uint64(63)) << np.uint64(mantissa + exponent_bits)
    bits = bits | encoded << np.uint64(mantissa) | words & np.uint64((1 << mantissa) - 1)
    if case.inputs == "special":  # few, so that a row and a column meet none, one or two of them
        top = ((1 << exponent_bits) - 1) << mantissa
        sign = 1 << (mantissa + exponent_bits)
        specials = np.array(
            [top, sign | top, top | 1 << (mantissa - 1), sign | top | 1, 0, sign, top - 1, 1], np.uint64
        )
        odd = (words >> np.uint64(24)) & np.uint64(0xFF) < np.uint64(3)
        bits = np.where(odd, specials[((words >> np.uint64(48)) % np.uint64(specials.size)).astype(np.int64)], bits)
    unsigned = f"u{numpy_dtype(dtype).itemsize}"
    return bits.astype(unsigned).view(numpy_dtype(dtype))


def plan(kernel: str, case: HalfCase, form: str = "") -> tuple[Problem, KernelSpec, Config, list[Image]]:
    """The product as it lies in memory, and the form that an H200 runs, or the one that is described."""
    images = [place(case, 0), place(case, 1), place(case, 2, poison=case.beta == 0)]
    problem = Problem(
        *(case.m, case.n, case.k, case.dtype),
        *(image.leading for image in images),
        *(image.offset * image.flat.itemsize % ALIGNMENT for image in images),
        *(case.alpha, case.beta, case.c_dtype, images[0].layout, images[1].layout),
    )
    spec, config = choose(problem, kernel, arch=ARCH, sm_count=SM_COUNT)
    if case.form == "columns":
        assert spec.candidates is not None
        config = next(one for one in spec.candidates(problem, SM_COUNT, ARCH) if dict(one).get("swapped"))
    elif case.form:
        wanted = next(
            known for known in spec.configs if form_of(spec, known) == case.form and dict(known)["dtype"] == case.dtype
        )
        types = {"c_dtype": case.c_dtype, "a_layout": problem.a_layout, "b_layout": problem.b_layout}
        config = make_config(**{**dict(wanted), **types})
        assert spec.unmet(problem, config) is None, f"{case}: {spec.unmet(problem, config)}"
    return problem, spec, described(form) if form else config, images


def emulate(kernel: str, case: HalfCase, form: str = "") -> tuple[NDArray[Any], str]:
    """C by the emulator, in the form that is described or would be chosen, and that form in words."""
    problem, spec, config, images = plan(kernel, case, form)
    machine = Machine(f"sm_{ARCH[0]}{ARCH[1]}")
    addresses = []
    for image in images:
        address = machine.alloc(image.flat.nbytes)
        machine.write(address, image.flat)
        addresses.append(address + image.offset * image.flat.itemsize)
    run_form(machine, problem, spec, config, Addresses(*addresses), ARCH)
    target = images[2]
    start = addresses[2] - target.offset * target.flat.itemsize
    after = machine.read(start, target.flat.dtype, target.flat.size)
    return target.result(after), describe_config(config)


def bits_of(matrix: NDArray[Any]) -> NDArray[Any]:
    """A matrix's elements as they are in memory, row by row."""
    return np.ascontiguousarray(matrix).view(f"u{matrix.itemsize}")


def canonical(matrix: NDArray[Any]) -> NDArray[Any]:
    """The same with one bit pattern for every NaN."""
    bits = bits_of(matrix)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        nans = np.isnan(matrix)
    return np.where(nans, bits.dtype.type(-1 % (1 << (8 * bits.itemsize - 1))), bits)


def digest(bits: NDArray[Any]) -> str:
    """SHA-256 of the elements in little-endian order."""
    return hashlib.sha256(bits.astype(f"<u{bits.itemsize}").tobytes()).hexdigest()
