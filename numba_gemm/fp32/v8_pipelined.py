"""v8 pipelined: past the lesson, whatever it takes to keep the FMA pipes busy.

Ideas       the next stage's copies run while this one is multiplied (`cp.async`, a ring of stages); fragments are
            loaded a step of k ahead; the FMAs of a step are written in serpentine order; an accumulator and the value
            of B that it is multiplied with lie in different banks of the register file.
Geometry    a form has its own. The large one: 128×128×16 tile, 128 threads of 16×8 outputs, two blocks an SM. Small
            ones have tiles down to 32×32 and share a tile's k among 2 to 8 groups of warps, which add up at the end.
Each k      6 LDS.128, 128 FMAs: 0.1875 values an FMA; two wavefronts each, since quarters of a warp merge.
Each stage  one barrier; 4 16-byte copies of each operand for 2048 FMAs a thread.
Split K     the k of some tiles is shared evenly by some blocks: of all tiles where they are few, or of the last wave's.
            Parts go to a workspace, and split_k_sum.py adds them up in order.
Apart       a last row or column of C that would begin a tile of its own is left to gemv, behind the product.
Stores      16 bytes each; where rows of C begin anywhere, 4 bytes, passed through shared memory so that the lanes of a
            store are neighbours.
Edges       rows and columns past C are copied from its first ones and never stored. The stages end with K, so only the
            first stage of a tile can be short, and is filled up with zeros: the main loop has no test.
Bound by    the register file. It has two banks, one read a cycle each, and an FMA reads three registers unless a factor
            is still in the operand cache.

An operand lies in shared memory as k rows. Where it does so in global memory, 16-byte copies go straight there. Where
its k is contiguous (A row-major), `cp.async` transposes it 4 bytes at a time, which costs 3% of a large form's speed; a
large factor is therefore turned once, in global memory, before the product. (A form can also load it into registers 16
bytes at a time with the first steps of a stage and store it with the last; none that is shipped does.)

Tried       (H200, 4096³, × cuBLAS of the same run) 8×8 outputs a thread in three stages, the last wave's tiles shared
            by 264 blocks, 1.027, by 132 1.005, not shared 1.006. 16×8: A transposed by 4-byte copies 1.020, through
            registers 0.998 in two stages, 1.019 in four; shared by 264 blocks 0.913, as their odd tiles run alone.
            Tiles of 128×256 1.007, of 256×128 0.973; 8×16 outputs 0.977; 16 rows of tiles together 0.989.
            4096×4096×4097 with A turned first 1.124, with A transposed by every tile 1.098.
            FMAs on registers alone, in the assembler's order, reach 55.9 TFLOP/s.
            4096×4095×4096: each thread stores its own outputs, 4 bytes at a time, 2660 µs; by rows 2580.
            4095×4097×4099: 33 tiles in a row 2.64 ms, the last column apart 2.61.
            Not timed: A kept along k in shared memory, to read four steps at a time: the assembler hoists those loads
            and tears the order of the FMAs apart (three registers read by 26% of them, 10% in serpentine order).

docs/fp32.md has the measured tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from numba_gemm.abi import PARAMETERS
from numba_gemm.fp32 import gemv_specs, repack, split_k_sum
from numba_gemm.fp32.gemv_specs import GEMV
from numba_gemm.fp32.v8_apart import Apart, set_apart
from numba_gemm.fp32.v8_choose import SHAPES, choices, choose_form, parameters_for
from numba_gemm.fp32.v8_parameters import VECTOR, V8Parameters
from numba_gemm.problem import ALIGNMENT, ITEMSIZE, Problem
from numba_gemm.spec import (
    MAX_GRID_Z,
    Addresses,
    Config,
    Geometry,
    KernelLaunch,
    KernelSpec,
    LaunchPlan,
    batch_addresses,
)

#: Rows of a copied factor begin at multiples of so many elements: 128 bytes, a line of the L2. Otherwise each 128 bytes
#: that a tile takes of a row lie in two lines.
LINE = 32
#: What of a config concerns only the launch.
LAUNCH_KEYS = ("split_tiles", "split_blocks", "copied", "row_apart", "column_apart")
#: Candidates that are worth timing are within this factor of the cheapest, by the model; and no more than so many.
WORTH_TIMING, MOST_CANDIDATES = 1.3, 12


def build(**config: int | str) -> Any:
    """The kernel of one form as a Python function for Numba."""
    from numba_gemm.fp32 import v8_kernel

    return v8_kernel.build(**config)


def geometry(config: Config) -> Geometry:
    """Tile, threads and dynamic shared memory of a form."""
    p = V8Parameters.of(config)
    return Geometry((p.block_m, p.block_n, p.block_k), p.threads, p.shared_bytes)


def select(problem: Problem, sm_count: int, arch: tuple[int, int]) -> Config:
    """The form for a problem, by the cost model."""
    return choose_form(problem, sm_count, arch).config


def candidates(problem: Problem, sm_count: int, arch: tuple[int, int]) -> list[Config]:
    """Forms worth timing for a problem, the likeliest first; for a vector one, as gemv is what takes it."""
    if 1 in (problem.m, problem.n):
        return [select(problem, sm_count, arch)]
    found = sorted(choices(problem, sm_count, arch), key=lambda choice: choice.cycles)
    return [choice.config for choice in found if choice.cycles <= WORTH_TIMING * found[0].cycles][:MOST_CANDIDATES]


def refuses_form(problem: Problem, config: Config) -> str | None:
    """Why a form can't take a product that it wasn't chosen for, in words, or None."""
    launch, parameters = dict(config), V8Parameters.of(config)
    for name, extent in (("row", problem.m), ("column", problem.n)):
        if launch.get(f"{name}_apart") and extent == 1:
            return f"C has no {name} beside the last one, which is apart"
    _, rest = set_apart(problem, row=bool(launch.get("row_apart")), column=bool(launch.get("column_apart")))
    for name in "ab":
        if name not in str(launch.get("copied", "")):
            layout, width = (getattr(parameters, f"{name}_{what}") for what in ("layout", "width"))
            if layout != getattr(rest, f"{name}_layout"):
                return f"{name.upper()} is not {layout}-major"
            if width > 1 and (reason := rest.misaligned(name.upper(), width)):
                return reason
    return rest.misaligned("C", VECTOR) if parameters.c_width > 1 else None


def plan(spec: KernelSpec, problem: Problem, config: Config) -> LaunchPlan:
    """The product, and behind it the row and the column of C that the config sets apart."""
    launch = dict(config)
    vectors, rest = set_apart(problem, row=bool(launch.get("row_apart")), column=bool(launch.get("column_apart")))
    whole = _plan_tiles(spec, rest, config)
    launches, workspace_bytes = list(whole.launches), whole.workspace_bytes
    for vector in vectors:
        parts = int(launch[f"{vector.name}_apart"])
        added = GEMV.plan(vector.problem, gemv_specs.in_parts(vector.problem, parts))
        begin = -(-workspace_bytes // ALIGNMENT) * ALIGNMENT
        launches += [_moved(one, vector, begin) for one in added.launches]
        workspace_bytes = begin + added.workspace_bytes
    return dataclasses.replace(whole, launches=tuple(launches), workspace_bytes=workspace_bytes)


def _moved(launch: KernelLaunch, vector: Apart, workspace: int) -> KernelLaunch:
    """A launch of a vector's product as one of the whole product: from its addresses, and behind its workspace."""

    def values(at: Addresses) -> tuple[Any, ...]:
        a, b, c = at.a + vector.a_bytes, at.b + vector.b_bytes, at.c + vector.c_bytes
        return launch.values(at._replace(a=a, b=b, c=c, workspace=at.workspace + workspace))

    return dataclasses.replace(launch, values=values)


def _plan_tiles(spec: KernelSpec, problem: Problem, config: Config) -> LaunchPlan:
    """Copies of misaligned factors if the config asks for them, the product, and the sum of parts if K is split."""
    launch = dict(config)
    workspace = repack.Workspace()
    launches: list[KernelLaunch] = []
    moved: dict[str, int] = {}
    p = problem
    for name in str(launch.get("copied", "")):
        copies, p, begin = _copied(p, name, workspace)
        launches += copies
        moved[name] = begin
    launches = repack.in_one(launches)
    main = len(launches)

    parameters = V8Parameters.of(config)
    split_tiles, split_blocks = int(launch.get("split_tiles", 0)), int(launch.get("split_blocks", 0))
    stages = parameters.stages_in(p.k)
    per_block = -(-split_tiles * stages // split_blocks) if split_blocks else 0
    tile_bytes = 4 * parameters.block_m * parameters.block_n
    begin_parts = (
        workspace.reserve(tile_bytes * (split_tiles + split_blocks) * min(p.batch, MAX_GRID_Z)) if per_block else 0
    )
    tiles = parameters.tiles(p.m, p.n)
    form = tuple(item for item in config if item[0] not in LAUNCH_KEYS)
    parts = -(-stages // per_block) + 1 if per_block else 0
    reduce_form = split_k_sum.form(
        parameters.block_m, parameters.block_n, parameters.group_m, parameters.c_width, parts
    )
    scalars = (p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.alpha, p.beta)
    strides = (p.batch_stride_a, p.batch_stride_b, p.batch_stride_c)
    split = (split_tiles, split_blocks, per_block)

    # Launches follow one another on a stream, so the parts of the next 65535 products take the place of the last.
    for first in range(0, p.batch, MAX_GRID_Z):
        count = min(MAX_GRID_Z, p.batch - first)

        def values(at: Addresses, first: int = first) -> tuple[Any, ...]:
            there = at._replace(**{name: at.workspace + begin for name, begin in moved.items()})
            parts_at = at.workspace + begin_parts if per_block else 0
            return (*batch_addresses(p, there, first), *scalars, *strides, parts_at, *split)

        def sum_values(at: Addresses, first: int = first) -> tuple[Any, ...]:
            c = batch_addresses(p, at, first)[2]
            scale = (p.ldc, p.alpha, p.beta, p.batch_stride_c)
            return (at.workspace + begin_parts, c, p.m, p.n, *scale, *split, stages)

        grid = (tiles - split_tiles + split_blocks, 1, count)
        # Not overlapping its copies: blocks that came early would fill the SMs that the copies leave first, two and
        # more on each, and leave others empty (1000x1001x1002 took 91 µs in place of 58 on an H200).
        launches.append(KernelLaunch(spec, form, grid, PARAMETERS[spec.abi], values))
        if per_block:
            grid = (split_tiles * split_k_sum.blocks_of_tile(reduce_form), 1, count)
            sums = split_k_sum.SPEC
            launches.append(KernelLaunch(sums, reduce_form, grid, PARAMETERS[sums.abi], sum_values, overlaps=True))
    whole = per_block and split_tiles == tiles
    return LaunchPlan(tuple(launches), workspace.size, per_block * parameters.block_k if whole else 0, main)


def _copied(problem: Problem, name: str, workspace: repack.Workspace) -> tuple[list[KernelLaunch], Problem, int]:
    """Launches that copy A into columns or B into rows of the workspace, 16-byte aligned; the problem with the copy in
    its place; where the copy begins."""
    p, itemsize = problem, ITEMSIZE[problem.dtype]
    if name == "a":
        extent, stride, apart, layout, offset = p.m, p.lda, p.batch_stride_a, p.a_layout, p.a_offset
    else:
        extent, stride, apart, layout, offset = p.n, p.ldb, p.batch_stride_b, p.b_layout, p.b_offset
    across, along = (1, stride) if (layout == "column") == (name == "a") else (stride, 1)
    padded = -(-extent // VECTOR) * VECTOR
    target_stride = padded if extent <= LINE else -(-extent // LINE) * LINE
    matrices = p.batch if apart else 1
    begin = workspace.reserve(itemsize * matrices * p.k * target_stride)
    target_apart = p.k * target_stride if apart else 0
    target_strides = (target_apart, target_stride, 1)
    # The kernel reads whole groups of four: zeros fill up the last one.
    shape, strides = (matrices, p.k, extent), (apart, along, across)
    made = repack.copies(itemsize, shape, offset, strides, 0, target_strides, filled=True)

    def addresses(at: Addresses) -> tuple[int, int]:
        return (at.a if name == "a" else at.b) - offset, at.workspace + begin

    new: dict[str, Any] = {f"ld{name}": target_stride, f"{name}_offset": 0, f"batch_stride_{name}": target_apart}
    new[f"{name}_layout"] = "column" if name == "a" else "row"
    return [copy.launch(addresses) for copy in made], dataclasses.replace(p, **new), begin


def _configs() -> tuple[Config, ...]:
    """The shapes that are shipped, for packed row-major matrices, aligned and not."""
    aligned, misaligned = Problem.packed(128, 128, 128), Problem.packed(127, 127, 127)
    made = [parameters_for(shape, problem) for problem in (aligned, misaligned) for shape in SHAPES]
    return tuple(p.config for p in made if p is not None)


_CONFIGS = _configs()
_LARGE = V8Parameters.of(_CONFIGS[0])

SPEC = KernelSpec(
    name="v8",
    title="pipelined",
    idea="asynchronous copies, serpentine FMAs, k shared among warps and blocks",
    block_tile=geometry(_CONFIGS[0]).block_tile,
    thread_tile=(_LARGE.thread_m, _LARGE.thread_n),
    threads=_LARGE.threads,
    loads_per_fma=(_LARGE.thread_m + _LARGE.thread_n) / (_LARGE.thread_m * _LARGE.thread_n),
    build=build,
    min_arch=(8, 0),
    configs=_CONFIGS,
    abi="gemm_f32_split",
    batched=True,
    helpers=(
        "numba_gemm.fp32.v8_kernel",
        "numba_gemm.fp32.v8_intrinsics",
        "numba_gemm.fp32.v8_sums",
        "numba_gemm.fp32.v8_parameters",
        "numba_gemm.intrinsics.dependence",
    ),
    entry_name="v8",
    geometry_of=geometry,
    select=select,
    plan_of=plan,
    refuses_form=refuses_form,
    candidates=candidates,
)
