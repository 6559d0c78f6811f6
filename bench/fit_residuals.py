"""Learn what the FP32 cost models get wrong: ``python bench/fit_residuals.py``. Needs catboost, and no GPU.

Reads records of ``bench/chooser.py`` (``chooser_*.json.gz``: forms of every kernel that takes a shape, timed on an
H200) and what ``numba-gemm tune`` timed of the suites (``tests/data/h200_tuned_forms.json``; large products with round
sizes are rare among random ones), and fits regression trees to log(measured / model) of v8's and skinny's forms and, in
sets of their own, of thin's and of outer's. Prints how good the pick is over shapes that the trees haven't seen, in
cross-validation, and writes the trees to ``numba_gemm/fp32/residuals_h200.npz``; what they may ask about a form, and
how they are read, is ``numba_gemm/fp32/choose_residuals.py``'s.

    --records FILE …   other records
    --trees N          how many of each set (default: 4000 for v8 and skinny, 3000 for thin, 1500 for outer)
    --folds N          of the cross-validation; 0 leaves it out (default 4)
    --output FILE      of the trees

The times of a GPU serve as long as its kernels do: measure again if v8, skinny, thin or outer change, or the models'
numbers. What was timed is what ``python bench/chooser.py --finals 0`` times, of the last eight as many shapes as a run
had time for, with

    --rounds 5 --shapes 2600 --seed 100 --wide   (and seed 101; before there was thin, in chooser_seed100.json.gz, …101)
    --rounds 5 --shapes 2600 --seed 100 --kernel thin   (and seed 101; in chooser_thin.json.gz: of thin's forms those
                                                         within 1.7 times the cheapest by an earlier model, at most 16)
    --rounds 5 --shapes 7000 --seed 102 --near   (chooser_near102.json.gz)
    --rounds 3 --batch 250 --shapes 30000 --seed 103 --kernel thin --wide   (chooser_thin103.json.gz)
    --rounds 3 --batch 250 --shapes 16000 --seed 104 --near   (chooser_near104.json.gz)
    --rounds 3 --batch 250 --shapes 60000 --seed 105 --near   (chooser_near105.json.gz, by the trees of all above)
    --rounds 3 --batch 250 --shapes 70000 --seed 106 --near --kernel thin --over 2.5   (…near106.json.gz, likewise)
    --rounds 3 --batch 250 --shapes 70000 --seed 107 --near --kernel thin --over 2.5   (chooser_near107.json.gz)
    --rounds 3 --batch 250 --shapes 40000 --seed 108 --near   (chooser_near108.json.gz)
    --rounds 3 --batch 250 --shapes 30000 --seed 109 --kernel outer --wide   (…outer109.json.gz, by outer's model)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("numba_gemm") is None:
    sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "bench"))

from chooser import CLOSE, MHZ, label  # noqa: E402
from chooser_records import read_record  # noqa: E402

from numba_gemm.fp32 import outer_choose, outer_tiles, thin_choose, thin_tiles  # noqa: E402
from numba_gemm.fp32.choose_fp32 import skinny_candidate, skinny_cycles  # noqa: E402
from numba_gemm.fp32.choose_residuals import (  # noqa: E402
    ARCH,
    FEATURES,
    FIELDS,
    KINDS,
    SM_COUNT,
    TREES,
    Candidate,
    Trees,
    features,
    known,
)
from numba_gemm.fp32.outer_specs import OUTER  # noqa: E402
from numba_gemm.fp32.thin_specs import THIN  # noqa: E402
from numba_gemm.fp32.v8_choose import candidate, modelled  # noqa: E402
from numba_gemm.fp32.v8_pipelined import SPEC  # noqa: E402
from numba_gemm.problem import Problem  # noqa: E402
from numba_gemm.processes import usable_cores  # noqa: E402
from numba_gemm.spec import make_config  # noqa: E402
from numba_gemm.timing import BATCH_US  # noqa: E402

SUITES = ROOT / "tests/data/h200_tuned_forms.json"
RECORDS = sorted((ROOT / "bench/results/nvidia-h200").glob("chooser_*.json.gz"))
#: A tree's questions, the share of each that is taken, and the steps of a feature that a question may choose from.
DEPTH, RATE, STEPS = 8, 0.1, 128
#: How many trees each kind of forms has.
TREE_COUNTS = {"tiles": 4000, "thin": 3000, "outer": 1500}
#: Forms count for less the further they are from the fastest: weights up to that multiple of it; none beyond the last.
WEIGHTS = ((1.2, 1.0), (1.6, 0.5), (2.5, 0.15))
#: A shape of the suites counts as so many random ones.
SUITE_WEIGHT = 10.0
#: Errors beyond this (log) are some accident's.
LARGEST_ERROR = 0.5
#: µs that a graph takes to begin, which a short batch feels; how many launches it has is found by an estimate that has
#: the host's part of a launch, if that takes longer.
START_US, LAUNCH_US = 3.1, 3.9
#: Leaves are kept as 8-bit integers times a scale of their tree.
LEVELS = 127
#: Rows whose corrections are worked out together.
AT_A_TIME = 2000


class Timings(NamedTuple):
    """Rows of forms that were timed: features, kind of trees, cycles by the model, µs, and the number of their shape.

    ``kind`` numbers ``KINDS``. ``apart`` has the µs of a row or column that gemv takes, by the model; the other numbers
    are without it. ``fastest`` has for each shape the µs of its fastest form, of any kernel; ``random`` whether the
    shape was drawn.
    """

    rows: Any
    kind: Any
    cycles: Any
    us: Any
    apart: Any
    shape: Any
    fastest: Any
    random: Any


Shape = tuple[Problem, dict[str, tuple[str, float]]]


def read_records(paths: list[Path]) -> Iterator[Shape]:
    """Each shape of records of chooser.py, with kernel and µs by the name of the form; of several records the first."""
    found: dict[Problem, dict[str, tuple[str, float]]] = {}
    for path in paths:
        head, rows = read_record(path)
        start = START_US / head.get("batch_us", BATCH_US)
        for row in rows:
            timed = found.setdefault(Problem.packed(row["m"], row["n"], row["k"]), {})
            for kernel, name, us, _ in row["times"]:
                timed.setdefault(name, (kernel, us - start * max(us, LAUNCH_US)))
    yield from found.items()


def read_suites(path: Path) -> Iterator[Shape]:
    """The same of the suites' FP32 products, as the tuner's record has them."""
    for product in json.loads(path.read_text(encoding="utf-8"))["products"]:
        if product["dtype"] != "float32":
            continue
        timed = {}
        for text, us in product["forms"].items():
            kernel, *pairs = text.split()
            values = dict(pair.split("=") for pair in pairs)
            config = make_config(**{key: int(one) if one.isdigit() else one for key, one in values.items()})
            timed[label(SPEC, config) if kernel == "v8" else text] = (kernel, us)
        yield Problem.packed(*product["shape"]), timed


def read(shapes: Iterable[Shape], *, random: bool) -> Timings:
    """The forms of v8, skinny, thin and outer that were timed."""
    with Pool(usable_cores()) as pool:
        found = [one for one in pool.map(read_shape, shapes, chunksize=50) if one is not None]
    columns = zip(*(row for _, rows in found for row in rows), strict=True)
    rows, kind, cycles, us, apart = (np.array(column) for column in columns)
    shape = np.repeat(np.arange(len(found)), [len(rows) for _, rows in found])
    fastest = np.array([least for least, _ in found])
    return Timings(rows.astype(np.float32), kind, cycles, us, apart, shape, fastest, np.full(len(fastest), random))


def read_shape(shape: Shape) -> tuple[float, list[tuple[Any, ...]]] | None:
    """The µs of a shape's fastest form and of each form features, kind, cycles, µs and µs apart; None if not known.

    Of products with a vector only outer's forms count; gemv has no trees.
    """
    problem, timed = shape
    found: list[tuple[Candidate, float, float]] = []
    if outer_tiles.refuses(problem) is None and known(problem, SM_COUNT, ARCH, vectors=True):
        for choice in outer_choose.modelled(problem, SM_COUNT, ARCH):
            name = label(OUTER, outer_tiles.config_of(problem, choice.tile))
            if name in timed:
                found.append((outer_choose.candidate(problem, choice, SM_COUNT, ARCH), timed[name][1], 0.0))
    if known(problem, SM_COUNT, ARCH):
        found += others(problem, timed)
        least = min(time for _, time in timed.values())
    elif found:
        least = min(time for _, time, _ in found)
    else:
        return None
    return least, [
        (features(one), KINDS.index(one.kind), one.cycles, time - apart, apart) for one, time, apart in found
    ]


def others(problem: Problem, timed: dict[str, tuple[str, float]]) -> list[tuple[Candidate, float, float]]:
    """The forms of v8, skinny and thin that were timed for a product, µs, and µs apart."""
    found = []
    for one in modelled(problem, SM_COUNT, ARCH):
        name = label(SPEC, one.choice.config)
        if name in timed:
            found.append((candidate(one.rest, one.choice), timed[name][1], one.apart / MHZ))
    for time in [time for kernel, time in timed.values() if kernel == "skinny"][:1]:
        by_model = skinny_cycles(problem, SM_COUNT, ARCH)
        found.append((skinny_candidate(problem, SM_COUNT, ARCH, by_model), time, 0.0))
    if thin_tiles.refuses(problem) is None:
        for choice in thin_choose.modelled(problem, SM_COUNT, ARCH):
            name = label(THIN, thin_tiles.config_of(problem, choice.tile, choice.parts))
            if name in timed:
                found.append((thin_choose.candidate(problem, choice, SM_COUNT, ARCH), timed[name][1], 0.0))
    return found


def together(first: Timings, second: Timings) -> Timings:
    """Timings of both."""
    second = second._replace(shape=second.shape + len(first.fastest))
    return Timings(*(np.concatenate(both) for both in zip(first, second, strict=True)))


def fastest_of_its_kind(timings: Timings) -> Any:
    """For each form the µs of the fastest of its kind for its shape: thin's, outer's, or v8's and skinny's.

    Where thin is much faster, forms of v8 that are near v8's fastest still say how v8 behaves.
    """
    kind = len(KINDS) * timings.shape + timings.kind
    fastest = np.full(len(KINDS) * len(timings.fastest), np.inf)
    np.minimum.at(fastest, kind, timings.us + timings.apart)
    return fastest[kind]


def fit(timings: Timings, chosen: Any, count: int | None) -> list[Trees]:
    """Trees of each kind for the chosen rows; as many as there should be, or ``TREE_COUNTS``."""
    return [
        fit_kind(timings, chosen & (timings.kind == index), count or TREE_COUNTS[kind])
        for index, kind in enumerate(KINDS)
    ]


def fit_kind(timings: Timings, chosen: Any, trees: int) -> Trees:
    """Trees of one kind for the chosen rows, which are of that kind."""
    try:
        from catboost import CatBoostRegressor
    except ImportError:
        raise SystemExit("fit_residuals.py needs catboost, which fits the trees: pip install catboost") from None

    slower = (timings.us + timings.apart) / fastest_of_its_kind(timings)
    weight = np.zeros(len(slower))
    for most, value in reversed(WEIGHTS):
        weight[slower <= most] = value
    weight *= np.where(timings.random, 1.0, SUITE_WEIGHT)[timings.shape]
    kept = chosen & (weight > 0)
    error = np.clip(np.log(timings.us * MHZ / timings.cycles), -LARGEST_ERROR, LARGEST_ERROR)
    model = CatBoostRegressor(
        iterations=trees, depth=DEPTH, learning_rate=RATE, l2_leaf_reg=1, border_count=STEPS,
        bootstrap_type="No", random_seed=0, verbose=False, allow_writing_files=False,
    )  # fmt: skip
    model.fit(timings.rows[kept], error[kept], sample_weight=weight[kept])
    return _trees_of(model)


def _trees_of(model: Any) -> Trees:
    """A catboost model as the arrays that the library reads."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        model.save_model(str(path), format="json")
        saved = json.loads(path.read_text())
    count = len(saved["oblivious_trees"])
    numbers = {(0, np.inf): 0}  # what isn't asked is answered by no
    asked = np.zeros((count, DEPTH), np.uint16)
    leaves = np.zeros((count, 2**DEPTH))
    for index, tree in enumerate(saved["oblivious_trees"]):
        splits = tree["splits"] or []
        for bit, split in enumerate(splits):
            question = split["float_feature_index"], split["border"]
            asked[index, bit] = numbers.setdefault(question, len(numbers))
        leaves[index, : 2 ** len(splits)] = tree["leaf_values"]
    features = np.array([feature for feature, _ in numbers], np.uint8)
    borders = np.array([border for _, border in numbers], np.float32)
    scale, (bias,) = saved["scale_and_bias"]
    leaves *= scale
    steps = _steps(leaves)
    return Trees(features, borders, asked, (np.rint(leaves / steps) * steps).astype(np.float32), bias)


def _steps(leaves: Any) -> Any:
    """Of each tree, of what its leaves are multiples in the file, (trees, 1)."""
    most = np.abs(leaves).max(axis=1, keepdims=True)
    return (np.where(most > 0, most, 1.0) / LEVELS).astype(np.float32)


def predict(trees: list[Trees], timings: Timings, chosen: Any) -> Any:
    """Corrections of the chosen rows, some at a time: each takes a number for each question of each tree."""
    found = np.zeros(len(timings.us))
    for index, of_kind in enumerate(trees):
        there = np.flatnonzero(chosen & (timings.kind == index))
        for part in np.array_split(there, -(-len(there) // AT_A_TIME)) if len(there) else ():
            found[part] = of_kind.predict(timings.rows[part])
    return found[chosen]


def picks(timings: Timings, corrections: Any) -> Any:
    """Of each shape, how many times the fastest form's time the pick takes."""
    cost = timings.cycles * np.exp(corrections) + timings.apart * MHZ
    order = np.lexsort((cost, timings.shape))
    first = np.flatnonzero(np.diff(timings.shape[order], prepend=-1))
    return (timings.us + timings.apart)[order[first]] / timings.fastest


def say(name: str, ratios: Any) -> None:
    shares = "  ".join(f"{(ratios <= 1 + most / 100).mean():.2%} within {most}%" for most in (2, 5, 10))
    print(f"{name}: {shares}  {np.exp(np.log(ratios).mean()) - 1:.2%} slower on the mean", flush=True)


def save(trees: list[Trees], path: Path) -> None:
    """Write the trees of each kind as ``choose_residuals.load_trees`` reads them."""
    arrays = {}
    for kind, of_kind in zip(KINDS, trees, strict=True):
        steps = _steps(of_kind.leaves)
        leaves = np.rint(of_kind.leaves / steps).astype(np.int8)
        fields = (of_kind.features, of_kind.borders, of_kind.asked, leaves, steps[:, 0], np.float64(of_kind.bias))
        arrays |= {f"{kind}_{name}": field for name, field in zip(FIELDS, fields, strict=True)}
    np.savez_compressed(path, **arrays)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, nargs="+", default=RECORDS)
    parser.add_argument("--trees", type=int)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=TREES)
    args = parser.parse_args()
    timings = together(read(read_records(args.records), random=True), read(read_suites(SUITES), random=False))
    print(f"{len(timings.us)} times of {len(timings.fastest)} shapes, {len(FEATURES)} features; picks")
    drawn = timings.random
    say("by the model", picks(timings, 0.0)[drawn])
    if args.folds:
        fold = np.random.default_rng(1).integers(0, args.folds, len(timings.fastest))
        fold = np.where(drawn, fold, args.folds)[timings.shape]  # the suites are always learnt from
        corrections = np.zeros(len(timings.us))
        for one in range(args.folds):
            away = fold == one
            corrections[away] = predict(fit(timings, ~away, args.trees), timings, away)
        say(f"corrected, of shapes not seen ({args.folds} folds)", picks(timings, corrections)[drawn])
    every = np.ones(len(timings.us), bool)
    trees = fit(timings, every, args.trees)
    found = picks(timings, predict(trees, timings, every))
    say("corrected, of shapes learnt from", found[drawn])
    say("corrected, of the suites", found[~drawn])
    save(trees, args.output)
    print(f"{args.output}: {args.output.stat().st_size / 1024:.0f} KiB; {CLOSE:.2f} is what the choice is held to")
    return 0


if __name__ == "__main__":
    sys.exit(main())
