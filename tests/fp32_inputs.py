"""The products on which the FP32 kernels of a GPU and of the emulator are compared bit for bit.

Every input comes from the raw 64-bit output of NumPy's PCG64, whose stream is fixed, by integer operations alone, so
that the hash of a GPU's output can be checked long after, under any NumPy version. Shapes, layouts and scale factors
are those of :mod:`numba_gemm.cases`; what fills the matrices is drawn here. A product is placed in memory here and the
form of the kernel is chosen here, as an H200 would: so both run the same text on the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from config_words import described
from images import Image
from numpy.typing import NDArray

from numba_gemm.cases import Case, Matrix, lay_out, small_cases
from numba_gemm.catalog import LADDER, SPECIAL, kernels_for
from numba_gemm.choose import choose
from numba_gemm.device.memory import rows_are_contiguous
from numba_gemm.emulate import run_form
from numba_gemm.emulator.machine import Machine
from numba_gemm.fp32 import outer_tiles, thin_tiles
from numba_gemm.fp32.thin import outputs_of, pass_of
from numba_gemm.fp32.v8_choose import SHAPES, Choice, Shape, parameters_for
from numba_gemm.problem import ALIGNMENT, Problem
from numba_gemm.spec import Addresses, Config, KernelSpec, describe_config

SEED = 20
ARCH, SM_COUNT = (9, 0), 132  # an H200

#: The FP32 kernels: the ladder's, then those for special shapes.
KERNELS = [*kernels_for("float32"), *SPECIAL]

#: Exponents that a kind of input draws from, and how often (of 256) an element is something else: see `_fill`.
EXPONENTS = {
    "random": np.array([1, 0, 0, 0, -1, -1, -1, -1, -2, -2, -3, -3, -4, -5, -6, -8]),
    "wide": np.arange(-60, 60),
    "subnormal": np.array([-60, -64, -68, -70, -72, -73, -74, -75, -76, -80, -126, -127, -127, -127, -127, -127]),
    "huge": np.arange(56, 66),
    "special": np.array([1, 0, 0, -1, -1, -2, -3, -5, 60, 127, -127]),
}

#: What an element of "special" may be instead: infinities, NaNs of several payloads, zeros, the extreme numbers.
SPECIALS = np.array(
    [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7FFFFFFF, 0x7F800001, 0, 0x80000000, 0x7F7FFFFF, 0x00000001],
    np.uint32,
)


@dataclass(frozen=True)
class FormCase(Case):
    """A product by a form of v8 that an H200 picks for larger ones alone.

    ``tile`` names the form as :func:`tile_of` does; the factors in ``copied`` are copied first; ``split`` is how many
    tiles' k how many blocks share.
    """

    tile: str = ""
    copied: str = ""
    split: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        copied = f" copied={self.copied}" if self.copied else ""
        split = f" split={self.split[0]}/{self.split[1]}" if self.split[1] else ""
        return f"{super().__str__()} {self.tile}{copied}{split}"


@dataclass(frozen=True)
class TileCase(Case):
    """A product by one of thin's or outer's tiles, by its number among those of its kind; thin's K in so many parts."""

    tile: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return f"{super().__str__()} tile={self.tile} parts={self.parts}"


def every_tile() -> Iterator[Case]:
    """Every tile of thin, on a product of several blocks and passes that ends inside both."""
    for (form, width, narrow), tiles in thin_tiles.TILES.items():
        for number, tile in enumerate(tiles):
            values = {**tile, "narrow": narrow}
            j = max(32, min(2 * outputs_of(form, values), 96)) + (4 if width == 4 else 5)
            k, i = pass_of(form, values) + 39, narrow - number % 3
            m, n = (j, i) if form == "along" else (i, j)
            alpha, beta = ((1.0, 0.0), (0.75, -1.25))[number % 2]
            yield TileCase(m, n, k, alpha=alpha, beta=beta, tile=number, parts=(1, 2, 5)[number % 3])


def every_outer_tile() -> Iterator[Case]:
    """Every tile of outer, on a product of several blocks that ends inside one both ways."""
    for (layout, aligned), tiles in outer_tiles.TILES.items():
        for number, tile in enumerate(tiles):
            m, n = 2 * tile["rows"] * tile["warps"] + 3, 32 * tile["columns"] + (36 if aligned else 37)
            alpha, beta = ((1.0, 0.0), (0.75, -1.25))[number % 2]
            in_memory = "packed" if layout == "row" else "transposed"
            k = (5, 13, 32)[number % 3]
            yield TileCase(m, n, k, layout=in_memory, alpha=alpha, beta=beta, tile=number)


def tile_of(shape: Shape) -> str:
    """The block tile of one of v8's shapes and its thread tile."""
    return "{block_m}x{block_n}x{block_k} {thread_m}x{thread_n}".format(**shape.parameters)


def cases(kernel: str) -> Iterator[Case]:
    """The products for one kernel."""
    if kernel in _CASES:
        yield from _CASES[kernel]
        return
    block_m, block_n, step = LADDER[kernel].block_tile
    yield from small_cases(max(block_m, block_n), step)
    yield Case(192, 160, 96)
    yield Case(131, 197, 75)
    yield Case(260, 132, 40, layout="sliced")
    yield Case(132, 136, 44, layout="padded", alpha=0.75, beta=-1.25)
    yield Case(136, 132, 52, alpha=-1.5, beta=0.375)
    yield Case(200, 72, 1)
    yield Case(68, 140, 64, inputs="wide")
    yield Case(33, 47, 129, inputs="wide", alpha=3.0, beta=0.1)
    for inputs in ("subnormal", "special", "huge"):
        yield Case(68, 72, 36, inputs=inputs)
        yield Case(35, 39, 21, inputs=inputs, alpha=0.625, beta=2.5)


#: The products of the kernels that have a form for each problem. Other cases bring out other forms.
_CASES: dict[str, list[Case]] = {
    "v8": [
        # 32×32 tiles, whose k four groups of warps share; with deep K many blocks too.
        Case(1, 1, 1),
        Case(64, 64, 64),
        Case(64, 64, 4096),
        Case(33, 35, 1301, layout="padded", alpha=0.75, beta=-1.25),
        Case(36, 40, 1000, layout="spaced", alpha=-1.5, beta=0.375),
        Case(67, 70, 53, layout="sliced"),
        Case(68, 72, 44, layout="transposed"),
        Case(39, 35, 45, layout="transposed", alpha=2.0, beta=0.5),
        Case(5, 6, 7, alpha=0.0, beta=0.5),
        Case(68, 140, 64, inputs="wide"),
        Case(33, 47, 129, inputs="wide", alpha=3.0, beta=0.1),
        *(Case(68, 72, 36, inputs=inputs) for inputs in ("subnormal", "special", "huge")),
        *(Case(35, 39, 21, inputs=inputs, alpha=0.625, beta=2.5) for inputs in ("subnormal", "special", "huge")),
        # Larger tiles, of which the chooser makes small products where K is short.
        Case(2500, 33, 100),
        Case(1000, 512, 8),
        Case(700, 1000, 8),
        Case(1028, 1000, 2),
        Case(2052, 1000, 1),
        # The forms of large products, with all that these have: rounds of stages, copies, parts that are added up.
        FormCase(132, 264, 132, alpha=0.75, beta=-1.25, tile="128x128x16 16x8", split=(2, 5)),
        FormCase(131, 133, 75, layout="sliced", tile="128x128x16 16x8", copied="ab"),
        FormCase(260, 132, 148, tile="128x128x16 8x8", copied="a", split=(6, 11)),
        FormCase(131, 197, 69, inputs="special", alpha=0.625, beta=2.5, tile="128x128x16 8x8"),
        FormCase(132, 68, 148, inputs="wide", tile="128x64x16 8x8", split=(2, 5)),
        FormCase(68, 132, 164, layout="spaced", tile="64x64x32 8x8", split=(6, 9)),
        FormCase(35, 67, 165, alpha=-1.5, beta=0.375, tile="32x64x32 8x8"),
        # Rows of C that begin anywhere, of tiles and of sums of parts.
        FormCase(131, 261, 133, alpha=0.75, beta=-1.25, tile="128x128x16 16x8", split=(6, 11)),
        FormCase(261, 131, 149, tile="128x128x16 8x8", split=(2, 5)),
        FormCase(131, 69, 149, layout="padded", tile="128x64x16 8x8", split=(2, 5)),
        FormCase(67, 133, 165, inputs="special", tile="64x64x32 8x8", split=(6, 9)),
        FormCase(37, 131, 261, inputs="wide", alpha=-1.5, beta=0.375, tile="32x64x32 8x8", split=(2, 7)),
    ],
    "gemv": [
        # A row vector times B, whose outputs are contiguous; A, contiguous along K, times a column vector.
        Case(1, 1, 1),
        Case(1, 131, 1),
        Case(131, 1, 1),
        Case(1, 72, 300),
        Case(72, 1, 300),
        Case(1, 4096, 40),
        # Deep K in parts.
        Case(1, 68, 2052, alpha=-1.5, beta=0.375),
        Case(9, 1, 16404, alpha=-1.5, beta=0.375),
        Case(1, 75, 1301, layout="padded", alpha=0.75, beta=-1.25),
        Case(75, 1, 1301, layout="padded", alpha=0.75, beta=-1.25),
        Case(1, 40, 132, layout="spaced"),
        Case(36, 1, 1028, layout="spaced"),
        Case(1, 67, 53, layout="sliced"),
        Case(67, 1, 53, layout="sliced"),
        Case(1, 36, 132, layout="transposed"),
        Case(36, 1, 132, layout="transposed", alpha=2.0, beta=0.5),
        Case(1, 6, 7, alpha=0.0, beta=0.5),
        Case(6, 1, 7, alpha=0.0, beta=0.5),
        *(
            case
            for inputs in ("wide", "subnormal", "special", "huge")
            for case in (
                Case(1, 72, 20, inputs=inputs),
                Case(72, 1, 20, inputs=inputs),
                Case(1, 39, 21, inputs=inputs, alpha=0.625, beta=2.5),
                Case(39, 1, 21, inputs=inputs, alpha=0.625, beta=2.5),
            )
        ),
    ],
    "skinny": [
        # A few rows, whose outputs are contiguous in B: runs of whole tiles, and of pieces that are added up.
        Case(8, 264, 100),
        Case(5, 516, 1000, alpha=-1.5, beta=0.375),
        Case(13, 139, 75),
        Case(16, 261, 301, layout="padded", alpha=0.75, beta=-1.25),
        # A few columns, whose outputs' terms are contiguous in A.
        Case(3, 2, 1),
        Case(200, 7, 1),
        Case(133, 7, 45, layout="sliced"),
        Case(300, 5, 1301, layout="padded", alpha=0.75, beta=-1.25),
        Case(260, 32, 100),
        Case(132, 20, 1000, alpha=2.0, beta=0.5),
        Case(300, 64, 77),
        Case(70, 35, 293),
        Case(6, 264, 68, layout="spaced"),
        Case(24, 132, 100, layout="transposed"),
        Case(260, 6, 52, layout="transposed"),
        Case(5, 8, 7, alpha=0.0, beta=0.5),
        *(
            case
            for inputs in ("wide", "subnormal", "special", "huge")
            for case in (
                Case(8, 72, 36, inputs=inputs),
                Case(39, 5, 21, inputs=inputs, alpha=0.625, beta=2.5),
            )
        ),
    ],
    "thin": [
        *every_tile(),
        # A few rows, then a few columns.
        Case(2, 3, 1),
        Case(3, 200, 1),
        Case(200, 7, 1),
        Case(4, 4096, 40),
        Case(4, 12, 6000),
        Case(13, 6, 4001),
        Case(5, 131, 301, layout="padded", alpha=0.75, beta=-1.25),
        Case(131, 5, 301, layout="padded", alpha=0.75, beta=-1.25),
        Case(9, 67, 53, layout="sliced"),
        Case(67, 9, 53, layout="sliced"),
        Case(6, 264, 68, layout="spaced"),
        Case(264, 6, 68, layout="spaced"),
        Case(4, 132, 100, layout="transposed"),
        Case(132, 4, 100, layout="transposed", alpha=2.0, beta=0.5),
        Case(5, 8, 7, alpha=0.0, beta=0.5),
        *(
            case
            for inputs in ("wide", "subnormal", "special", "huge")
            for case in (
                Case(8, 72, 36, inputs=inputs),
                Case(39, 5, 21, inputs=inputs, alpha=0.625, beta=2.5),
            )
        ),
    ],
    "outer": [
        *every_outer_tile(),
        Case(1, 1, 1),
        Case(2, 3, 1),
        Case(1, 300, 7),
        Case(300, 1, 7),
        Case(33, 260, 9),
        Case(130, 33, 31, layout="padded", alpha=0.75, beta=-1.25),
        Case(67, 53, 6, layout="sliced"),
        Case(68, 72, 4, layout="spaced", alpha=-1.5, beta=0.375),
        Case(39, 35, 3, layout="transposed", alpha=2.0, beta=0.5),
        Case(5, 8, 7, alpha=0.0, beta=0.5),
        *(
            case
            for inputs in ("wide", "subnormal", "special", "huge")
            for case in (
                Case(68, 72, 20, inputs=inputs),
                Case(39, 37, 21, inputs=inputs, alpha=0.625, beta=2.5),
            )
        ),
    ],
}


def place(matrix: Matrix, *, columns_too: bool = False, poison: bool = False) -> Image:
    """A matrix with the row stride that it has, or column stride if it may be column-major, and at the same place
    within 16 bytes; ``poison`` leaves NaNs in place of the values."""
    layout = "row"
    if not rows_are_contiguous(matrix):
        if columns_too and rows_are_contiguous(matrix.T):
            layout = "column"
        else:
            matrix = np.ascontiguousarray(matrix)
    lines, length = matrix.shape if layout == "row" else matrix.shape[::-1]
    stride = matrix.strides[0 if layout == "row" else 1]
    leading = stride // 4 if lines > 1 else length
    offset = matrix.__array_interface__["data"][0] % ALIGNMENT // 4
    flat = np.full(offset + (lines - 1) * leading + length, np.nan, np.float32)
    image = Image(flat, matrix.shape, offset, leading, layout)
    if not poison:
        image.view(flat)[...] = matrix
    return image


def plan(kernel: str, case: Case, form: str = "") -> tuple[Problem, KernelSpec, Config, list[Image]]:
    """The product as it lies in memory, and the form that an H200 runs, or the one that is described.

    Transposed factors stay column-major for the kernels with a form for each problem and are made row-major for the
    others; C is row-major for all.
    """
    columns_too = kernel in _CASES
    a, b, c = draw(case)
    images = [place(a, columns_too=columns_too), place(b, columns_too=columns_too), place(c, poison=case.beta == 0)]
    problem = Problem(
        *(case.m, case.n, case.k if case.alpha != 0 else 0, "float32"),
        *(image.leading for image in images),
        *(4 * image.offset for image in images),
        *(case.alpha, case.beta, "float32", images[0].layout, images[1].layout),
    )
    spec, config = choose(problem, kernel, arch=ARCH, sm_count=SM_COUNT)
    if isinstance(case, FormCase):
        shape = next(known for known in SHAPES if tile_of(known) == case.tile)
        parameters = parameters_for(shape, problem, case.copied, ARCH)
        assert parameters is not None, f"{case}: there is no such form"
        config = Choice(parameters, *case.split, case.copied).config
    if isinstance(case, TileCase) and kernel == "outer":
        config = outer_tiles.config_of(problem, outer_tiles.tiles_of(problem)[case.tile])
    elif isinstance(case, TileCase):
        config = thin_tiles.config_of(problem, thin_tiles.tiles_of(problem)[case.tile], case.parts)
    if form and spec.select is not None:
        config = described(form)
    assert spec.unmet(problem, config) is None, f"{case}: {spec.unmet(problem, config)}"
    return problem, spec, config, images


def entry_of(spec: KernelSpec, config: Config) -> str:
    """A form in words: the name of its PTX entry, or all that is chosen for a problem."""
    return spec.entry(config) if spec.select is None else describe_config(config)


def emulate(kernel: str, case: Case, form: str = "") -> tuple[Matrix, str]:
    """C by the emulator, where reading what is in no matrix, or in a C that isn't read, is an error; and the form."""
    problem, spec, config, images = plan(kernel, case, form)
    machine = Machine(f"sm_{ARCH[0]}{ARCH[1]}")
    addresses = []
    for which, image in enumerate(images):
        begin = machine.alloc(image.flat.nbytes)
        addresses.append(begin + 4 * image.offset)
        machine.memory.strided(begin, np.float32, image.flat.shape, (4,))[0][...] = image.flat
        matrix = image.view(image.flat)
        _, initialised = machine.memory.strided(addresses[-1], np.float32, matrix.shape, matrix.strides)
        assert initialised is not None
        initialised[...] = which < 2 or case.beta != 0
    run_form(machine, problem, spec, config, Addresses(*addresses), ARCH)
    target = images[2]
    after = machine.read(addresses[2] - 4 * target.offset, np.float32, target.flat.size)
    return target.result(after), entry_of(spec, config)


def draw(case: Case) -> tuple[Matrix, Matrix, Matrix]:
    """A, B and C of a case, laid out in memory as it says."""
    a = _fill(case, 0, (case.m, case.k))
    b = _fill(case, 1, (case.k, case.n))
    c = _fill(case, 2, (case.m, case.n))
    return _lay_out(a, case.layout), _lay_out(b, case.layout), _lay_out(c, case.layout)


def _lay_out(matrix: Matrix, layout: str) -> Matrix:
    """As ``lay_out`` does; "spaced": rows 4 elements apart, which keeps whole ones on 16-byte boundaries."""
    if layout != "spaced":
        return lay_out(matrix, layout)
    rows, columns = matrix.shape
    view = np.full((rows, columns + 4), np.nan, np.float32)[:, :columns]
    view[...] = matrix
    return view


def _fill(case: Case, which: int, shape: tuple[int, int]) -> Matrix:
    rows, columns = shape
    source = np.random.PCG64([SEED, case.m, case.n, case.k, which])
    words: NDArray[np.uint64] = source.random_raw(rows * columns).reshape(shape)
    inputs = case.inputs
    if inputs == ("onehot_a", "onehot_b", "")[which]:
        matrix = np.zeros(shape, np.float32)
        if which == 0:
            matrix[np.arange(rows), (words[:, 0] >> np.uint64(33)) % np.uint64(columns)] = 1
        else:
            matrix[(words[0] >> np.uint64(33)) % np.uint64(rows), np.arange(columns)] = 1
        return matrix
    if inputs not in EXPONENTS:
        return ((words >> np.uint64(33)) % np.uint64(17)).astype(np.float32) - np.float32(8)
    exponents = EXPONENTS[inputs]
    chosen = exponents[((words >> np.uint64(40)) % np.uint64(exponents.size)).astype(np.int64)]
    sign = (words >> np.uint64(63)) << np.uint64(31)
    bits = sign | ((chosen + 127).astype(np.uint64) << np.uint64(23)) | (words & np.uint64(0x7FFFFF))
    drawn = bits.astype(np.uint32)
    if inputs == "special":  # few, so that a row and a column meet none, one or two of them
        odd = (words >> np.uint64(24)) & np.uint64(0xFF) < np.uint64(3)
        drawn = np.where(odd, SPECIALS[((words >> np.uint64(48)) % np.uint64(SPECIALS.size)).astype(np.int64)], drawn)
    return drawn.view(np.float32)


def bits_of(matrix: Matrix) -> NDArray[np.uint32]:
    """A matrix's elements as they are in memory, row by row."""
    return np.ascontiguousarray(matrix).view(np.uint32)


def canonical(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The same with one bit pattern for every NaN."""
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FFFFFFF), bits)


def digest(bits: NDArray[np.uint32]) -> str:
    """SHA-256 of the elements in little-endian order."""
    return hashlib.sha256(bits.astype("<u4").tobytes()).hexdigest()
