"""Run ``mma.sync`` on the random tiles of ``tests/mma_inputs.py`` and record what the GPU gives.

Run by hand, on a machine with a Hopper GPU, from the repository's root::

    python tests/gpu/record_mma.py --output tests/data/h200_mma.npz

One warp computes one tile: each lane loads its registers of A, B and C, as ``numba_gemm.fragments`` packs
them, runs one instruction, and stores its registers of D. The outputs are compared with
``numba_gemm.emulator.tensorcore`` bit for bit; mismatches are counted by category, tried against other rules,
and some are kept beside the record. The record holds, for each instruction and category, the SHA-256 of all
outputs in the order of ``mma_inputs.blocks``, and a few whole tiles. ``--dry-run`` needs no GPU: a stand-in
unpacks the registers and asks the emulator.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mma_inputs import CASES, Case, blocks, comparable  # noqa: E402

from numba_gemm.emulator.tensorcore import Rule, mma, rule  # noqa: E402
from numba_gemm.fragments import Fragment, fragment, pack, unpack  # noqa: E402

Bits = NDArray[Any]
ARCH = "sm_90"
KEPT_TILES = 4  # whole tiles of each category in the record
KEPT_MISMATCHES = 16

# One warp, one tile. Register r of lane l of tile w lies at element (32 w + l) * registers + r of its array,
# so a lane reads its registers from consecutive addresses. `bits` is b64 for f64 alone, whose registers are
# 64 bits wide.
PTX = """
.version 8.4
.target sm_90
.address_size 64

.visible .entry one_mma(
    .param .u64 a_registers,
    .param .u64 b_registers,
    .param .u64 c_registers,
    .param .u64 d_registers)
{{
    .reg .{bits}  %a<{a_count}>, %b<{b_count}>, %c<{d_count}>, %d<{d_count}>;
    .reg .b32  %tile, %lane, %slot;
    .reg .b64  %a_base, %b_base, %c_base, %d_base;

    // --- this lane's place: slot = 32 * tile + lane
    mov.u32          %tile, %ctaid.x;
    mov.u32          %lane, %tid.x;
    mad.lo.u32       %slot, %tile, 32, %lane;
    ld.param.u64     %a_base, [a_registers];
    ld.param.u64     %b_base, [b_registers];
    ld.param.u64     %c_base, [c_registers];
    ld.param.u64     %d_base, [d_registers];
    cvta.to.global.u64 %a_base, %a_base;
    cvta.to.global.u64 %b_base, %b_base;
    cvta.to.global.u64 %c_base, %c_base;
    cvta.to.global.u64 %d_base, %d_base;
    mad.wide.u32     %a_base, %slot, {a_bytes}, %a_base;
    mad.wide.u32     %b_base, %slot, {b_bytes}, %b_base;
    mad.wide.u32     %c_base, %slot, {d_bytes}, %c_base;
    mad.wide.u32     %d_base, %slot, {d_bytes}, %d_base;

    // --- load the fragments
{loads}

    // --- the instruction under test
    mma.sync.aligned.{shape}.row.col.{d_type}.{a_type}.{b_type}.{acc_type}
        {{{d_list}}},
        {{{a_list}}},
        {{{b_list}}},
        {{{c_list}}};

    // --- store the result
{stores}
    ret;
}}
"""


@dataclasses.dataclass(frozen=True)
class Fragments:
    a: Fragment
    b: Fragment
    c: Fragment
    d: Fragment


def fragments_of(case: Case) -> Fragments:
    name = case.shape_name
    return Fragments(
        fragment(name, "A", case.a_type),
        fragment(name, "B", case.b_type),
        fragment(name, "C", case.acc_type),
        fragment(name, "D", case.d_type),
    )


def ptx_of(case: Case) -> str:
    """The module for one case: the template with its register lists, loads and stores written out."""
    held = fragments_of(case)
    # mma takes f32, f64 and s32 accumulators in registers of their type or of the untyped kind of that width.
    wide = case.a_type == "f64"
    bits, width = ("f64", 8) if wide else ("b32", 4)
    counts = {"a": held.a.registers, "b": held.b.registers, "c": held.c.registers, "d": held.d.registers}
    lists = {p: ", ".join(f"%{p}{i}" for i in range(n)) for p, n in counts.items()}
    loads = [f"    ld.global.{bits}  %{p}{i}, [%{p}_base + {width * i}];" for p in "abc" for i in range(counts[p])]
    stores = [f"    st.global.{bits}  [%d_base + {width * i}], %d{i};" for i in range(counts["d"])]
    return PTX.format(
        bits=bits,
        a_count=counts["a"],
        b_count=counts["b"],
        d_count=counts["d"],
        a_bytes=width * counts["a"],
        b_bytes=width * counts["b"],
        d_bytes=width * counts["d"],
        shape=case.shape_name,
        a_type=case.a_type,
        b_type=case.b_type,
        acc_type=case.acc_type,
        d_type=case.d_type,
        a_list=lists["a"],
        b_list=lists["b"],
        c_list=lists["c"],
        d_list=lists["d"],
        loads="\n".join(loads),
        stores="\n".join(stores),
    )


class Gpu:
    """The first CUDA device, through the driver API."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._call(driver.cuInit(0))
        device = self._call(driver.cuDeviceGet(0))
        context = self._call(driver.cuDevicePrimaryCtxRetain(device))
        self._call(driver.cuCtxSetCurrent(context))
        name = self._call(driver.cuDeviceGetName(96, device))
        attribute = driver.CUdevice_attribute
        major, minor = (
            self._call(driver.cuDeviceGetAttribute(which, device))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        if (major, minor) != (9, 0):
            raise SystemExit(f"this record is of compute capability 9.0; the device has {major}.{minor}")
        self.name = f"{name.split(bytes(1))[0].decode()}, driver {self._call(driver.cuDriverGetVersion())}"

    def _call(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(error)
            raise RuntimeError(f"{error}: {text.decode() if text else 'unknown error'}")
        return values[0] if len(values) == 1 else None

    def load(self, case: Case) -> None:
        self._case = case
        module = self._call(self._driver.cuModuleLoadData(ptx_of(case).encode() + b"\0"))
        self._function = self._call(self._driver.cuModuleGetFunction(module, b"one_mma"))

    def run(self, a: Bits, b: Bits, c: Bits) -> Bits:
        """Registers ``[tiles, 32, registers]`` of A, B and C to those of D."""
        cu = self._driver
        held = fragments_of(self._case)
        d = np.zeros((*c.shape[:2], held.d.registers), c.dtype)
        arrays = [np.ascontiguousarray(x) for x in (a, b, c, d)]
        pointers = [self._call(cu.cuMemAlloc(x.nbytes)) for x in arrays]
        try:
            for pointer, array in zip(pointers, arrays, strict=True):
                self._call(cu.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))
            values = np.array([int(p) for p in pointers], np.uint64)
            # cuLaunchKernel wants an array of addresses of the parameters.
            addresses = np.array([values[i:].ctypes.data for i in range(len(values))], np.uint64)
            self._call(cu.cuLaunchKernel(self._function, len(a), 1, 1, 32, 1, 1, 0, 0, addresses.ctypes.data, 0))
            self._call(cu.cuCtxSynchronize())
            out = np.empty_like(d)
            self._call(cu.cuMemcpyDtoH(out.ctypes.data, pointers[3], out.nbytes))
        finally:
            for pointer in pointers:
                self._call(cu.cuMemFree(pointer))
        return out


class StandIn:
    """No GPU: the registers unpacked, multiplied by the emulator, and packed again."""

    name = "dry run, no GPU"

    def load(self, case: Case) -> None:
        ptx_of(case)
        self._case = case

    def run(self, a: Bits, b: Bits, c: Bits) -> Bits:
        held = fragments_of(self._case)
        return pack(held.d, emulate(self._case, unpack(held.a, a), unpack(held.b, b), unpack(held.c, c)))


def emulate(case: Case, a: Bits, b: Bits, c: Bits, override: Rule | None = None) -> Bits:
    return mma(
        a,
        b,
        c,
        a_type=case.a_type,
        b_type=case.b_type,
        acc_type=case.acc_type,
        d_type=case.d_type,
        arch=ARCH,
        override=override,
    )


def compute(device: Gpu | StandIn, case: Case, a: Bits, b: Bits, c: Bits) -> Bits:
    """D of every tile, raw bits in the dtype of the emulator's."""
    held = fragments_of(case)
    d = unpack(held.d, device.run(pack(held.a, a), pack(held.b, b), pack(held.c, c)))
    return d.view(np.int32) if case.d_type == "s32" else d


def hypotheses(case: Case) -> dict[str, Rule]:
    """Neighbouring rules, tried where the emulator's own is wrong."""
    if case.a_type in ("s8", "f64"):
        return {}
    own = rule(case.a_type, case.d_type, case.shape[2], ARCH)
    emin = -126 if case.d_type == "f32" else -14
    tried = {f"floor {emin + d:+d}": dataclasses.replace(own, exponent_floor=emin + d) for d in range(0, -10, -1)}
    tried["no floor"] = dataclasses.replace(own, exponent_floor=-900)
    for bits in (23, 24, 26, 27):
        tried[f"{bits} bits"] = dataclasses.replace(own, fraction_bits=bits)
    if own.through_f16:
        plain = dataclasses.replace(own, through_f16=False)
        tried["fused, 13 bits"] = dataclasses.replace(plain, group=32, fraction_bits=13, result_bits=13)
        tried["fused, 25 bits"] = dataclasses.replace(plain, group=32)
        tried["in order, halves"] = plain
    return tried


def show_mismatches(case: Case, inputs: tuple[Bits, Bits, Bits], got: Bits) -> None:
    """What a wrong category looks like: a few outputs, and how other rules would do on the block."""
    a, b, c = inputs
    want = comparable(case, emulate(case, a, b, c))
    for tile, i, j in np.argwhere(want != got)[:3]:
        print(f"      tile {tile} ({i}, {j}): GPU {got[tile, i, j]:#x}, emulator {want[tile, i, j]:#x}")
        print(f"        a {' '.join(f'{x:x}' for x in a[tile, i])}")
        print(f"        b {' '.join(f'{x:x}' for x in b[tile, :, j])}   c {c[tile, i, j]:x}")
    own = int(np.count_nonzero(want != got))
    print(f"      in the first wrong block {own} of {got.size} outputs differ; other rules that do better:")
    for name, other in hypotheses(case).items():
        wrong = int(np.count_nonzero(comparable(case, emulate(case, a, b, c, other)) != got))
        if wrong < own:
            print(f"        '{name}': {wrong}")


def record_case(device: Gpu | StandIn, case: Case, store: dict[str, Bits], bad: dict[str, Bits]) -> dict[str, Any]:
    """Run one case; fill ``store`` with whole tiles and ``bad`` with mismatching ones. Counts and hashes."""
    device.load(case)
    hashes: dict[str, str] = {}
    wrong: dict[str, int] = {}
    kept: list[list[Bits]] = []
    for category in case.categories:
        digest, count, outputs, shown = hashlib.sha256(), 0, 0, False
        for index, (a, b, c) in enumerate(blocks(case, category)):
            d = comparable(case, compute(device, case, a, b, c))
            digest.update(np.ascontiguousarray(d).tobytes())
            different = comparable(case, emulate(case, a, b, c)) != d
            count += int(np.count_nonzero(different))
            outputs += d.size
            if index == 0:
                kept.append([x[:KEPT_TILES] for x in (a, b, c, d)])
            if different.any() and not shown:
                shown = True
                show_mismatches(case, (a, b, c), d)
                tiles = np.flatnonzero(different.any(axis=(1, 2)))[:KEPT_MISMATCHES]
                for part, array in zip("abcd", (a, b, c, d), strict=True):
                    bad[f"{case.name}_{category}_{part}"] = array[tiles]
        hashes[category], wrong[category] = digest.hexdigest(), count
        print(f"  {case.name:9} {category:11} {count:9} of {outputs:9} outputs differ", flush=True)
    for part, arrays in zip("abcd", zip(*kept, strict=True), strict=True):
        store[f"{case.name}_{part}"] = np.concatenate(arrays)
    return {"seed": case.seed, "tiles": case.tiles, "sha256": hashes, "mismatches": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="default: tests/data/h200_mma.npz, or a scratch file if dry")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the emulator stands in for it")
    parser.add_argument("--print-ptx", metavar="CASE", choices=CASES, help="print one case's PTX and stop")
    parser.add_argument("--case", action="append", choices=CASES, help="only this case (may be repeated)")
    options = parser.parse_args()
    if options.print_ptx:
        print(ptx_of(CASES[options.print_ptx]))
        return 0

    device: Gpu | StandIn = StandIn() if options.dry_run else Gpu()
    print(device.name)
    store: dict[str, Bits] = {}
    bad: dict[str, Bits] = {}
    cases: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in options.case or CASES:
        case, start = CASES[name], time.perf_counter()
        print(f"{name}: {case.tiles} tiles of {case.shape_name}", flush=True)
        try:
            cases[name] = record_case(device, case, store, bad)
        except Exception as error:  # the other cases are still worth recording: there may be no second run
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"  FAILED: {failed[name]}", flush=True)
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
    meta = {"device": device.name, "arch": ARCH, "cases": cases}
    scratch = Path(tempfile.gettempdir()) / "dry_mma.npz"
    output = options.output or (scratch if options.dry_run else ROOT / "tests" / "data" / "h200_mma.npz")
    output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(output, meta=np.array(json.dumps(meta)), **store)  # type: ignore[arg-type]
    print(f"{output}: {output.stat().st_size / 1024:.0f} KB")
    if bad:
        path = output.with_suffix(".mismatches.npz")
        np.savez_compressed(path, **bad)  # type: ignore[arg-type]
        print(f"{path}: mismatching tiles of {', '.join(sorted({key[:-2] for key in bad}))}")
    return 1 if bad or failed else 0


if __name__ == "__main__":
    sys.exit(main())
