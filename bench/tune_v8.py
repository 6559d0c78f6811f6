"""Which form of v8 is fastest here: ``python bench/tune_v8.py``. Needs a GPU and torch; takes about three minutes.

For each shape of the FP32 suites: every choice that the cost model compares closely, and the forms below that aren't
shipped, compiled side by side in processes, checked against float64, and timed interleaved with cuBLAS. The fastest and
the model's own choice are marked; errors are relative Frobenius norms against float64, of v8 and of cuBLAS.

    --suites square small …   which suites (default: all of them)
    --shape MxNxK             this shape instead; can be given again
    --model                   only what the model chooses
    --rounds N                rounds of each contender (default 5)
    --save FILE               write the times as JSON: tests/data/h200_v8_forms.json, which the model is held against
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("numba_gemm") is None:
    sys.path.insert(0, str(ROOT))

from numba_gemm.benchmark.suites import SUITES as ALL_SUITES  # noqa: E402
from numba_gemm.compile.ahead import compile_ahead  # noqa: E402
from numba_gemm.errors import NumbaGemmError  # noqa: E402
from numba_gemm.fp32.v8_choose import Choice, choices, choose_form  # noqa: E402
from numba_gemm.fp32.v8_pipelined import SPEC  # noqa: E402
from numba_gemm.problem import Problem  # noqa: E402

#: Shapes by suite; of products that are for v8 ("skinny" ones have kernels of their own).
SUITES = {
    name: tuple((shape.m, shape.n, shape.k) for shape in shapes)
    for name, shapes in ALL_SUITES.items()
    if name != "skinny"
}
#: Changes to the model's form that are tried beside it; those that break a constraint are left out.
VARIATIONS: tuple[dict[str, int], ...] = (
    {"stages": 2},
    {"stages": 3},
    {"stages": 4},
    {"parts": 1},
    {"parts": 2},
    {"parts": 4},
    {"a_width": 4, "parts": 4},
    {"group_m": 16},
    {"blocks_per_sm": 1},
    {"blocks_per_sm": 2},
)
WORTH_TIMING = 1.4
MOST = 12


def contenders(problem: Problem, sm_count: int, arch: tuple[int, int], *, model: bool) -> list[Choice]:
    """The model's choice first, then what is tried beside it."""
    chosen = choose_form(problem, sm_count, arch)
    if model:
        return [chosen]
    near = sorted(choices(problem, sm_count, arch), key=lambda choice: choice.cycles)
    found = [chosen, *(choice for choice in near[:MOST] if choice.cycles <= WORTH_TIMING * chosen.cycles)]
    for changes in VARIATIONS:
        try:
            found.append(replace(chosen, parameters=replace(chosen.parameters, **changes)))
        except NumbaGemmError:
            continue
    able = [c for c in found if c.parameters.fits(arch) and SPEC.unmet(problem, c.config) is None]
    unique = {choice.config: choice for choice in able}
    return list(unique.values())


def compile_all(problems: list[Problem], plans: list[list[Choice]], arch: tuple[int, int]) -> None:
    """Fill the disk cache with every kernel of every plan, one process a core."""
    launches = [
        one
        for problem, found in zip(problems, plans, strict=True)
        for choice in found
        for one in SPEC.plan(problem, choice.config).launches
    ]
    compile_ahead([(one.spec, one.config) for one in launches], arch)


def measure(problem: Problem, found: list[Choice], rounds: int) -> tuple[float, list[tuple[Choice, float]]]:
    """Print the table of one shape; returns cuBLAS's time by that of the model's choice, and each choice's time."""
    import torch

    from numba_gemm.benchmark.peers import find_peer
    from numba_gemm.device.context import current_context
    from numba_gemm.execute import Prepared, prepare_form
    from numba_gemm.timing import set_count, time_interleaved

    context = current_context()
    m, n, k = problem.m, problem.n, problem.k
    sets = set_count(problem.bytes_moved, context.device.l2_bytes, limit=12)
    a = [torch.randn(m, k, device="cuda") for _ in range(sets)]
    b = [torch.randn(k, n, device="cuda") for _ in range(sets)]
    c = [torch.empty(m, n, device="cuda") for _ in range(sets)]
    rows = torch.cat([torch.randint(0, m, (62,)), torch.tensor([0, m - 1])]).cuda()
    exact = a[0][rows].double() @ b[0].double()
    stream = torch.cuda.current_stream().cuda_stream

    def error_of(launch: object) -> float:
        c[0].fill_(float("nan"))
        launch(0, stream)  # type: ignore[operator]
        torch.cuda.synchronize()
        return ((c[0][rows].double() - exact).norm() / exact.norm()).item()

    peer, reason = find_peer("auto", "float32")
    if peer is None:
        raise SystemExit(f"cuBLAS is needed: {reason}")
    works = [lambda i, s: peer.gemm(a[i].data_ptr(), b[i].data_ptr(), c[i].data_ptr(), m, n, k, s)]
    names, errors, timed = ["cublas"], [error_of(works[0])], []
    for choice in found:
        try:
            prepared = prepare_form(problem, SPEC, choice.config, context)
        except NumbaGemmError as error:
            print(f"  failed {choice.parameters.label}: {str(error).splitlines()[0]}")
            continue
        room = torch.empty(max(1, prepared.workspace_bytes), dtype=torch.uint8, device="cuda")

        def work(i: int, s: int, prepared: Prepared = prepared, room: torch.Tensor = room) -> None:
            there = room.data_ptr() if prepared.workspace_bytes else 0
            prepared.launch(a[i].data_ptr(), b[i].data_ptr(), c[i].data_ptr(), s, workspace=there)

        error = error_of(work)
        if not error < 1e-5:
            print(f"  WRONG {choice.parameters.label}: error {error:.2e}")
            continue
        split = f" split {choice.split_tiles}/{choice.split_blocks}" if choice.split_blocks else ""
        copied = f" copied {choice.copied}" if choice.copied else ""
        works.append(work)
        timed.append(choice)
        apart = "".join(f" {name} apart" for name, _ in choice.apart)
        names.append(f"{choice.parameters.label}{split}{copied}{apart}")
        errors.append(error)
    times = time_interleaved(works, sets=sets, rounds=rounds)
    print(f"\n{m}x{n}x{k}, {sets} sets")
    model = names[1] if timed and timed[0] == found[0] else ""
    for t, name, error in sorted(zip(times, names, errors, strict=True), key=lambda row: row[0].us):
        mark = "*" if name == model else " "
        rate = 2e-6 * m * n * k / t.us
        print(f" {mark}{t.us:10.2f} us {rate:6.2f} TF {t.ratio:6.3f} x cuBLAS, error {error:.2e}  {name}")
    sys.stdout.flush()
    return times[1].ratio if model else float("nan"), [(c, t.us) for c, t in zip(timed, times[1:], strict=True)]


def save(path: Path, gpu: str, sm_count: int, cuda: str, measured: dict[Problem, list[tuple[Choice, float]]]) -> None:
    """Write times as ``tests/data/h200_v8_forms.json`` has them: the forms, and a row for each choice and its µs."""
    forms: dict[str, int] = {}
    rows: list[list[Any]] = []
    for p, choices_of in measured.items():
        for choice, us in choices_of:
            form = forms.setdefault(json.dumps(asdict(choice.parameters)), len(forms))
            split = (choice.split_tiles, choice.split_blocks)
            rows.append([p.m, p.n, p.k, form, *split, choice.copied, dict(choice.apart), round(us, 2), 1])
    columns = ["m", "n", "k", "form", "split_tiles", "split_blocks", "copied", "apart", "us", "run"]
    head = json.dumps({"gpu": gpu, "sm_count": sm_count, "cuda": cuda, "date": f"{datetime.date.today()}"})
    body = ",\n".join(map(json.dumps, rows))
    text = f'{{"environment": {head},\n"columns": {json.dumps(columns)},\n"forms": [\n'
    path.write_text(text + ",\n".join(forms) + f'\n],\n"rows": [\n{body}\n]}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="*", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--shape", action="append")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    suites = {name: SUITES[name] for name in args.suites}
    if args.shape:
        shapes = [tuple(int(x) for x in shape.lower().split("x")) for shape in args.shape]
        suites = {"given": tuple((m, n, k) for m, n, k in shapes)}

    import torch

    from numba_gemm.device.context import current_context

    torch.manual_seed(1)
    torch.zeros(1, device="cuda")  # makes torch's context, the device's primary one, current
    device = current_context().device
    arch, sm_count = device.compute_capability, device.sm_count
    print(f"{device.name}, {sm_count} SMs, driver {device.driver_version}, torch {torch.__version__}")
    problems = {name: [Problem.packed(*shape) for shape in shapes] for name, shapes in suites.items()}
    flat = [problem for group in problems.values() for problem in group]
    plans = {problem: contenders(problem, sm_count, arch, model=args.model) for problem in flat}
    compile_all(flat, [plans[problem] for problem in flat], arch)
    summary, times = [], {}
    for name, group in problems.items():
        ratios = []
        for problem in group:
            ratio, times[problem] = measure(problem, plans[problem], args.rounds)
            ratios.append(ratio)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        summary.append(f"{name}: {mean:.3f} x cuBLAS, " + ", ".join(f"{ratio:.3f}" for ratio in ratios))
    if args.save:
        save(args.save, device.name, sm_count, ".".join(map(str, device.driver_version)), times)
    print("\nthe model's choices, geometric mean and each shape")
    print("\n".join(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
