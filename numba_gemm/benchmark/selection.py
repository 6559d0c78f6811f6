"""Which kernels a benchmark runs, in which element types, and what has to be compiled for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba_gemm.benchmark.peers import Peer, find_peer
from numba_gemm.benchmark.runner import AUTO, Task
from numba_gemm.catalog import CPU_BASELINE, get_spec, kernels_for
from numba_gemm.errors import NumbaGemmError
from numba_gemm.spec import Config

#: The ladders that are run where nothing else is asked for.
_DEFAULT_DTYPES = ("float32", "float16")


def suite_kernels(dtype: str, arch: tuple[int, int] | None = None) -> list[str]:
    """What a suite runs: the library's own choice, and the two topmost rungs of the type's ladder for any shape.

    That leaves w1 out, which is w2's first step. ``arch``: the compute capability that they run on; None counts all.
    """
    return [AUTO, *[name for name in kernels_for(dtype, arch) if name != "w1"][-2:]]


def kernels_by_dtype(
    names: Sequence[str], dtype: str | None = None, *, suite: bool = False, arch: tuple[int, int] | None = None
) -> dict[str, list[str]]:
    """Element type → the GPU kernels to run in it.

    Parameters
    ----------
    names : kernels and :data:`AUTO`; none stands for the whole ladders, or for :func:`suite_kernels`. The CPU baseline
        is no GPU kernel, and left out.
    dtype : run everything in this type; None takes each kernel's first, for ``auto`` those of the others.
    suite : whether the shapes are a suite's.
    arch : compute capability, for which the ladders are; None for whole ladders.

    Raises
    ------
    ValueError : for a kernel that doesn't take ``dtype``.
    """
    if not names:
        dtypes = (dtype,) if dtype else _DEFAULT_DTYPES[:1] if suite else _DEFAULT_DTYPES
        return {one: suite_kernels(one, arch) if suite else kernels_for(one, arch) for one in dtypes}
    chosen: dict[str, list[str]] = {dtype: []} if dtype else {}
    for name in names:
        if name in (AUTO, CPU_BASELINE):
            if name == CPU_BASELINE and dtype not in (None, "float32"):
                raise ValueError(f"kernel {CPU_BASELINE} is measured in float32; leave --dtype {dtype} out")
            continue
        spec = get_spec(name)
        if dtype and dtype not in spec.dtypes:
            raise ValueError(f"kernel {name} takes {' and '.join(spec.dtypes)}, not {dtype}")
        chosen.setdefault(dtype or spec.dtypes[0], [])
    if AUTO in names and not chosen:
        chosen["float32"] = []
    for name in dict.fromkeys(names):
        if name == AUTO:
            for own in chosen.values():
                own.append(AUTO)
        elif name != CPU_BASELINE:
            chosen[dtype or get_spec(name).dtypes[0]].append(name)
    return {one: own for one, own in chosen.items() if own}


def ladder_names(names: Sequence[str], dtype: str) -> list[str]:
    """The kernels to compile: those named, or all that take the type if the library's own choice is among them."""
    return kernels_for(dtype) if AUTO in names else list(names)


def needed_forms(tasks: Sequence[Task], device: Any) -> list[tuple[str, Config, tuple[int, int]]]:
    """The forms that tasks will launch on a GPU, to be compiled ahead on all cores.

    A kernel that can't take a task's product is left out; running the task will say so.
    """
    from numba_gemm.choose import choose

    forms = []
    arch = device.compute_capability
    for task in tasks:
        problem = task.problem
        for name in task.kernels:
            try:
                spec, config = choose(problem, None if name == AUTO else name, arch=arch, sm_count=device.sm_count)
            except (NumbaGemmError, ValueError):
                continue
            plan = spec.plan(problem, config)
            forms.append((spec.name, plan.launches[plan.main].config, arch))
    return list(dict.fromkeys(forms))


def find_peers(choice: str, dtypes: Sequence[str]) -> tuple[dict[str, Peer], str]:
    """The peer in each element type, and in FP32 to compare 16 bits with; and why there is none, in words.

    Parameters
    ----------
    choice : as for :func:`~numba_gemm.benchmark.peers.find_peer`.
    dtypes : of the run.
    """
    peers: dict[str, Peer] = {}
    why_not = ""
    for dtype in dict.fromkeys((*dtypes, "float32")):
        peer, reason = find_peer(choice, dtype)
        if peer is not None:
            peers[dtype] = peer
        why_not = why_not or reason
    return peers, why_not
