"""How good the library's choice of an FP32 kernel is: ``python bench/chooser.py``. Needs a GPU and torch.

Draws shapes with log-uniform dimensions 1 … 8192, the same ones for the same seed. For each, every form of every kernel
that the tuner would time (``numba_gemm.tune.candidates``) is checked against float64 and timed, interleaved with cuBLAS
and with the form that the library picks by its model; tables of tuned kernels are left aside. Forms that take more than
1.5 times the fastest in the first round aren't timed again; those within a tenth of the fastest, and the pick, are
timed anew with more rounds, as the fastest of thirty by a few rounds is the luckiest. All forms are compiled before,
side by side in processes.

Writes ``bench/results/<gpu>/chooser.json``: each shape with the pick, its time, the fastest form and its time, and
every form that was timed as [kernel, form, µs, rounds]; and the share of shapes whose pick is within 5% of the fastest,
the worst, and the geometric mean. Prints that and the worst picks.

    --shapes N    how many (default 200)
    --seed S      of the shapes (default 1)
    --rounds N    rounds (default 7)
    --finals N    rounds in which the fastest are timed anew, in three goes (default 21; 0 leaves it out)
    --batch US    µs that are timed at once (default 1000)
    --seconds S   begin no shape later than so long after the first one (Ctrl-C also ends it with what was timed)
    --name FILE   of the record (default chooser.json); one that ends in .gz is packed, for fit_residuals.py
    --wide        time every form of v8, thin and outer that its model has within 3 times the cheapest, not only what
                  the tuner would
    --near        time only the forms that the choice finds nearly equal: many shapes, to learn from; no vectors
    --over US     with --near, leave out shapes that take less by the choice
    --kernel NAME time only this kernel's forms beside the pick, at the shapes that it takes
    --compile     compile what it needs for an H200, count it and end; needs no GPU
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("numba_gemm") is None:
    sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "bench"))

from chooser_records import write_record  # noqa: E402

from numba_gemm.catalog import get_spec  # noqa: E402
from numba_gemm.choose import choose  # noqa: E402
from numba_gemm.compile.ahead import compile_ahead  # noqa: E402
from numba_gemm.errors import NumbaGemmError  # noqa: E402
from numba_gemm.fp32 import (  # noqa: E402
    choose_fp32,
    outer_choose,
    outer_tiles,
    skinny_specs,
    thin_choose,
    thin_tiles,
    v8_pipelined,
)
from numba_gemm.fp32.outer_specs import OUTER  # noqa: E402
from numba_gemm.fp32.skinny_specs import SKINNY  # noqa: E402
from numba_gemm.fp32.thin_specs import THIN  # noqa: E402
from numba_gemm.fp32.v8_choose import choices  # noqa: E402
from numba_gemm.fp32.v8_parameters import V8Parameters  # noqa: E402
from numba_gemm.problem import Problem  # noqa: E402
from numba_gemm.processes import usable_cores  # noqa: E402
from numba_gemm.spec import Config, KernelSpec, describe_config  # noqa: E402
from numba_gemm.tune import Candidate, candidates  # noqa: E402

LARGEST = 8192
#: The best pick is one that is at most so much slower than the fastest form.
CLOSE = 1.05
#: Forms beyond this multiple of the fastest in the first round aren't timed again; up to the next, they are in the end.
HOPELESS, FINALISTS = 1.5, 1.1
#: The last rounds are in so many goes, each on other matrices: runs on the same ones differed by 6% for some forms.
GOES = 3
#: Rows of C that are checked, and the largest relative error (Frobenius norm) of FP32 sums up to K = 8192.
CHECKED_ROWS, LARGEST_ERROR = 16, 1e-5
#: With ``--wide``, forms are timed up to this multiple of the cheapest by the model, of v8 no more than so many.
WIDE, MOST_WIDE = 3.0, 40
#: With ``--near``, forms up to this multiple of the cheapest's cycles, but so many at least and at most.
NEAR, FEWEST_NEAR, MOST_NEAR = 1.1, 3, 9
#: From so many problems on, processes work out their contenders.
MANY = 400
#: Picks beyond ``CLOSE`` that are printed, the worst first.
PRINTED = 20
H200 = ((9, 0), 132)
#: Cycles in a µs of an H200.
MHZ = 1980


def draw(count: int, seed: int) -> list[Problem]:
    """Packed row-major problems with dimensions whose logarithms are uniform."""
    rng = random.Random(seed)

    def size() -> int:
        return max(1, min(LARGEST, round(math.exp(rng.uniform(0, math.log(LARGEST))))))

    return [Problem.packed(size(), size(), size()) for _ in range(count)]


def contenders(
    problem: Problem,
    arch: tuple[int, int],
    sm_count: int,
    *,
    wide: bool = False,
    near: bool = False,
    over: float = 0.0,
    kernel: str = "",
) -> list[Candidate]:
    """The model's pick first, then what the tuner would time beside it, then all that the models know."""
    pick = choose(problem, arch=arch, sm_count=sm_count)
    if near:
        found = nearly_equal(problem, arch, sm_count, over)
        return list(dict.fromkeys([pick, *found])) if found else []
    found = []
    if not (wide and kernel in ("thin", "outer")):  # what the tuner would time of them is among their widest
        found += candidates(problem, arch=arch, sm_count=sm_count)
    if wide and kernel in ("", "outer"):
        found += all_of_outer(problem, arch, sm_count)
    if wide and 1 not in (problem.m, problem.n):
        if kernel in ("", "v8"):
            every = sorted(choices(problem, sm_count, arch), key=lambda choice: choice.cycles)
            some = [choice for choice in every if choice.cycles <= WIDE * every[0].cycles]
            found += [(v8_pipelined.SPEC, choice.config) for choice in some[:MOST_WIDE]]
        if kernel in ("", "thin"):
            found += all_of_thin(problem, arch, sm_count)
    return list(dict.fromkeys([pick, *(one for one in found if kernel in ("", one[0].name))]))


def all_of_thin(problem: Problem, arch: tuple[int, int], sm_count: int) -> list[Candidate]:
    """thin's forms for a problem that it takes, those that its model finds very slow left out."""
    if THIN.refuses is None or THIN.refuses(problem) is not None:
        return []
    found = thin_choose.choices(problem, sm_count, arch)
    some = [choice for choice in found if choice.cycles <= WIDE * found[0].cycles]
    return [(THIN, thin_tiles.config_of(problem, choice.tile, choice.parts)) for choice in some]


def all_of_outer(problem: Problem, arch: tuple[int, int], sm_count: int) -> list[Candidate]:
    """The same of outer."""
    if OUTER.refuses is None or OUTER.refuses(problem) is not None:
        return []
    found = outer_choose.choices(problem, sm_count, arch)
    some = [choice for choice in found if choice.cycles <= WIDE * found[0].cycles]
    return [(OUTER, outer_tiles.config_of(problem, choice.tile)) for choice in some]


def contenders_of_all(
    problems: list[Problem], arch: tuple[int, int], sm_count: int, **which: Any
) -> list[list[Candidate]]:
    """The contenders of each problem, worked out side by side in processes where there are many."""
    of_one = functools.partial(contenders, arch=arch, sm_count=sm_count, **which)
    if len(problems) < MANY:
        return [of_one(problem) for problem in problems]
    with get_context("spawn").Pool(usable_cores()) as pool:
        return pool.map(of_one, problems, chunksize=MANY // 10)


def nearly_equal(problem: Problem, arch: tuple[int, int], sm_count: int, over: float) -> list[Candidate]:
    """The forms whose cycles, as the choice sees them, are near the cheapest's, of all kernels that it compares.

    None if the cheapest takes less than so many µs at an H200's clock.
    """
    found = [(choice.cycles, v8_pipelined.SPEC, choice.config) for choice in choices(problem, sm_count, arch)]
    if SKINNY.refuses is not None and SKINNY.refuses(problem) is None:
        cycles = choose_fp32.corrected_skinny(problem, sm_count, arch)
        found.append((cycles, SKINNY, skinny_specs.choose_form(problem, sm_count, arch)))
    if THIN.refuses is not None and THIN.refuses(problem) is None:
        for choice in thin_choose.choices(problem, sm_count, arch):
            found.append((choice.cycles, THIN, thin_tiles.config_of(problem, choice.tile, choice.parts)))
    if OUTER.refuses is not None and OUTER.refuses(problem) is None:
        for one in outer_choose.choices(problem, sm_count, arch):
            found.append((one.cycles, OUTER, outer_tiles.config_of(problem, one.tile)))
    found.sort(key=lambda one: one[0])
    if found[0][0] < over * MHZ:
        return []
    most = NEAR * found[0][0]
    near = [one for index, one in enumerate(found) if index < FEWEST_NEAR or one[0] <= most]
    return [(spec, config) for _, spec, config in near[:MOST_NEAR]]


def label(spec: KernelSpec, config: Config) -> str:
    """A form in words."""
    if spec.name != "v8":
        return f"{spec.name} {describe_config(config)}".strip()
    values = dict(config)
    split = f" split {values['split_tiles']}/{values['split_blocks']}" if values["split_blocks"] else ""
    copied = f" copied {values['copied']}" if values["copied"] else ""
    apart = "".join(f" {name} apart" for name in ("row", "column") if values.get(f"{name}_apart"))
    return f"v8 {V8Parameters.of(config).label}{split}{copied}{apart}"


def compile_all(problems: list[Problem], forms_of: list[list[Candidate]], arch: tuple[int, int]) -> None:
    """Compile every form of every contender, and say how many there are."""
    start = time.perf_counter()
    forms = {
        (one.spec, one.config)
        for problem, found in zip(problems, forms_of, strict=True)
        for spec, config in found
        for one in spec.plan(problem, config).launches
    }
    new = compile_ahead(sorted(forms, key=lambda form: form[0].name, reverse=True), arch)
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(Counter(spec.name for spec, _ in forms).items()))
    print(f"{len(forms)} forms ({kinds}), {new} of them compiled in {time.perf_counter() - start:.0f} s", flush=True)


class Bench:
    """Times contenders on matrices that are cut from one stretch of random numbers."""

    def __init__(self, rounds: int, finals: int, batch_us: float) -> None:
        import torch

        from numba_gemm.benchmark.peers import find_peer
        from numba_gemm.device.context import current_context

        self.rounds, self.finals, self.batch_us = rounds, finals, batch_us
        self.torch = torch
        torch.manual_seed(1)
        self.random = random.Random(1)
        self.values = torch.randn(3 * 2**28, device="cuda")  # 3 GB, past the L2 for every shape
        self.context = current_context()
        self.peer, reason = find_peer("auto", "float32")
        if self.peer is None:
            raise SystemExit(f"cuBLAS is needed: {reason}")

    def inputs(self, problem: Problem, sets: int) -> list[tuple[Any, Any, Any]]:
        """A, B and C of each set, from anywhere on; they begin at multiples of 256 bytes."""
        m, n, k = problem.m, problem.n, problem.k
        position, found = 64 * self.random.randrange(self.values.numel() // 64), []

        def cut(rows: int, columns: int) -> Any:
            nonlocal position
            if position + rows * columns > self.values.numel():
                position = 0
            part = self.values[position : position + rows * columns].view(rows, columns)
            position += -(-rows * columns // 64) * 64
            return part

        for _ in range(sets):
            found.append((cut(m, k), cut(k, n), self.torch.empty(m, n, device="cuda")))
        return found

    def measure(self, problem: Problem, forms: list[Candidate]) -> dict[str, Any]:
        """One row of the record."""
        from numba_gemm.execute import prepare_form
        from numba_gemm.timing import set_count, time_interleaved

        torch, (m, n, k) = self.torch, (problem.m, problem.n, problem.k)
        sets = set_count(problem.bytes_moved, self.context.device.l2_bytes, limit=12)
        inputs = self.inputs(problem, sets)
        rows = torch.unique(torch.linspace(0, m - 1, min(m, CHECKED_ROWS), device="cuda").long())
        exact = inputs[0][0][rows].double() @ inputs[0][1].double()
        stream = torch.cuda.current_stream().cuda_stream

        def cublas(index: int, on: int) -> None:
            a, b, c = inputs[index]
            self.peer.gemm(a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k, on)

        works, names, failed = [cublas], ["cublas"], []
        for spec, config in forms:
            try:
                prepared = prepare_form(problem, spec, config, self.context)
            except NumbaGemmError as error:
                failed.append(f"{label(spec, config)}: {str(error).splitlines()[0]}")
                continue
            room = torch.empty(max(1, prepared.workspace_bytes), dtype=torch.uint8, device="cuda")

            def work(index: int, on: int, prepared: Any = prepared, room: Any = room) -> None:
                a, b, c = inputs[index]
                there = room.data_ptr() if prepared.workspace_bytes else 0
                prepared.launch(a.data_ptr(), b.data_ptr(), c.data_ptr(), on, workspace=there)

            c = inputs[0][2]
            c.fill_(float("nan"))
            work(0, stream)
            error = ((c[rows].double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
            # One element is checked on the scale of its terms, as it may be a small sum of large ones.
            allowed = LARGEST_ERROR if exact.numel() > 4 else 1e-3
            if not error < allowed or not bool(torch.isfinite(c).all()):
                failed.append(f"{label(spec, config)}: error {error:.1e}")
                continue
            works.append(work)
            names.append(label(spec, config))
        torch.cuda.synchronize()
        timings = time_interleaved(
            works, sets=sets, rounds=self.rounds, hopeless=HOPELESS, kept=2, batch_us=self.batch_us
        )
        if self.finals and len(works) > 2:
            least = min(timing.us for timing in timings[1:] if timing.rounds == self.rounds)
            last = [index for index in range(len(works)) if index < 2 or timings[index].us <= FINALISTS * least]
            goes = []
            for _ in range(GOES):
                inputs[:] = self.inputs(problem, sets)
                contest = [works[index] for index in last]
                rounds = -(-self.finals // GOES)
                goes.append(time_interleaved(contest, sets=sets, rounds=rounds, batch_us=self.batch_us))
            for index, own in zip(last, zip(*goes, strict=True), strict=True):
                us = statistics.median(timing.us for timing in own)
                timings[index] = replace(own[0], us=us, rounds=sum(timing.rounds for timing in own))
        most = max((timing.rounds for timing in timings[1:]), default=0)
        times = {
            name: timing.us
            for name, timing in zip(names, timings, strict=True)
            if name == "cublas" or timing.rounds == most
        }
        of_cublas = times.pop("cublas")
        seen = [
            [name.split()[0], name, round(timing.us, 3), timing.rounds]
            for name, timing in zip(names[1:], timings[1:], strict=True)
        ]
        pick = label(*forms[0])
        best = min(times, key=lambda name: times[name]) if times else ""
        return {
            "m": m,
            "n": n,
            "k": k,
            "pick": pick,
            "us": times.get(pick),
            "best": best,
            "best_us": times.get(best),
            "ratio": times[pick] / times[best] if pick in times else None,
            "cublas_us": of_cublas,
            "tried": len(forms),
            "failed": failed,
            "times": seen,
        }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The share of picks that are close to the fastest, the worst, and means."""
    right = [row for row in rows if row["ratio"] is not None]
    worst = max(right, key=lambda row: row["ratio"])

    def mean(ratios: list[float]) -> float:
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    return {
        "shapes": len(rows),
        "failed": sum(len(row["failed"]) for row in rows),
        "within_5_percent": sum(row["ratio"] <= CLOSE for row in right) / len(rows),
        "worst": worst["ratio"],
        "worst_shape": [worst["m"], worst["n"], worst["k"]],
        "geometric_mean": mean([row["ratio"] for row in right]),
        "times_cublas": mean([row["cublas_us"] / row["us"] for row in right]),
    }


def print_worst(rows: list[dict[str, Any]]) -> None:
    """The picks that aren't close, the worst first, two to a line each."""
    far = [row for row in rows if row["failed"] or row["ratio"] is None or row["ratio"] > CLOSE]
    far.sort(key=lambda row: -(row["ratio"] or math.inf))
    for row in far[:PRINTED]:
        shape = f"{row['m']}x{row['n']}x{row['k']}"
        pick, best = (f"{row[us] or math.nan:.2f} {row[name]}" for us, name in (("us", "pick"), ("best_us", "best")))
        print(f"{shape} {row['ratio'] or math.nan:.3f} | {pick} | {best}", *row["failed"][:1], sep=" | ")
    if far[PRINTED:]:
        print(f"and {len(far) - PRINTED} more")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--finals", type=int, default=21)
    parser.add_argument("--batch", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--near", action="store_true")
    parser.add_argument("--over", type=float, default=0.0)
    parser.add_argument("--kernel", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, help="folder of the record (default: bench/results/<gpu>)")
    parser.add_argument("--name", default="chooser.json")
    parser.add_argument("--commit", help="of the checkout, where git can't tell")
    args = parser.parse_args()
    problems = draw(args.shapes, args.seed)
    if args.near:
        problems = [problem for problem in problems if 1 not in (problem.m, problem.n)]
    if args.kernel:
        refuses = get_spec(args.kernel).refuses
        problems = [problem for problem in problems if refuses is None or refuses(problem) is None]
    which = {"wide": args.wide, "near": args.near, "over": args.over, "kernel": args.kernel}
    if args.compile:
        compile_all(problems, contenders_of_all(problems, *H200, **which), H200[0])
        return 0

    from numba_gemm.benchmark.record import SCHEMA, environment, slug

    bench = Bench(args.rounds, args.finals, args.batch)
    device = bench.context.device
    arch, sm_count = device.compute_capability, device.sm_count
    forms_of = contenders_of_all(problems, arch, sm_count, **which)
    compile_all(problems, forms_of, arch)
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    try:
        for problem, forms in zip(problems, forms_of, strict=True):
            if not forms:
                continue
            if time.perf_counter() - start > args.seconds:
                break
            rows.append(bench.measure(problem, forms))
    except KeyboardInterrupt:
        print("stopped: what was timed is written")
    print_worst(rows)
    found = summary(rows)
    print(f"{len(rows)} shapes timed in {time.perf_counter() - start:.0f} s: {json.dumps(found)}")
    record = {
        "schema": SCHEMA,
        "environment": environment(device, peer=bench.peer.version, commit=args.commit),
        "seed": args.seed,
        "rounds": args.rounds,
        "finals": args.finals,
        "batch_us": args.batch,
        "summary": found,
        **which,
    }
    path = (args.output or ROOT / "bench" / "results" / slug(device.name)) / args.name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, record, rows)
    print(f"written to {path}")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
