"""Fences (PTX ISA 9.7.13.4): those between proxies matter here, those between threads of one proxy don't."""

from __future__ import annotations

from typing import Any

from .module import Instruction
from .program import Decoder, Run, op


def _nothing(b: Any) -> None:
    """Batches run in one thread of the host, so ordinary accesses are seen in the order in which they execute."""


@op("fence", "membar")
def fence(d: Decoder, ins: Instruction) -> Run:
    mods = ins.mods
    if any(m.startswith("async::generic") for m in mods):
        raise d.unsupported(ins, "a proxy fence of one direction")
    shared = "shared" in "".join(mods) or "global" not in mods
    if "proxy" in mods and "async" in mods and shared:

        def proxy(b: Any) -> None:
            lanes = b.indices()
            b.shared.proxy_fence(lanes)
            b.mbarriers.fenced(lanes)

        return proxy
    if "mbarrier_init" in mods:
        return lambda b: b.mbarriers.fenced(b.indices())
    return _nothing
