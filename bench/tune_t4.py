"""Which form of t4 is fastest here: ``python bench/tune_t4.py``. Needs a GPU and torch; takes about a minute.

Every form is assembled, checked against a product in float64, and timed at 4096, 8192 and 2048 cubed, all forms
interleaved with cuBLAS and with a kernel that only issues ``mma.sync`` from registers, whose rate is the ceiling. Then
split-K forms at 128×128×65536. A form that fails is a row with its error.

    --form BM,BN,BK,WM,WN,STAGES,GROUP    try this form instead of the usual ones; can be given again
    --layout row/column                   layouts of A and B (default: row/row)
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("numba_gemm") is None:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from numba_gemm.abi import PARAMETERS  # noqa: E402
from numba_gemm.benchmark import ceiling  # noqa: E402
from numba_gemm.benchmark.ceiling import Ceiling  # noqa: E402
from numba_gemm.benchmark.peers import find_peer  # noqa: E402
from numba_gemm.compile.assembler import assemble  # noqa: E402
from numba_gemm.compile.kernel import CompiledKernel  # noqa: E402
from numba_gemm.compile.resources import read_resources  # noqa: E402
from numba_gemm.device.context import Context, Device, current_context  # noqa: E402
from numba_gemm.device.launch import launch  # noqa: E402
from numba_gemm.device.module import Function, load  # noqa: E402
from numba_gemm.tensorcore import splitk_reduce  # noqa: E402
from numba_gemm.tensorcore.t4 import T4Parameters  # noqa: E402
from numba_gemm.tensorcore.t4_choose import FORMS  # noqa: E402
from numba_gemm.timing import set_count, time_interleaved  # noqa: E402

SHAPE_NAMES = ("block_m", "block_n", "block_k", "warp_m", "warp_n", "stages", "group_m")
SIZES = (4096, 8192, 2048)
#: Shape arguments of split-K forms, and the splits to try at DEEP.
DEEP = (128, 128, 65536)
DEEP_FORMS = (
    ((128, 128, 64, 64, 32, 4, 8), (64, 128)),
    ((128, 64, 64, 64, 32, 4, 8), (32, 64, 128)),
    ((64, 128, 64, 32, 64, 4, 8), (64, 128)),
    ((64, 64, 64, 32, 32, 4, 8), (32, 64, 86)),
    ((64, 64, 64, 32, 32, 6, 8), (32, 64)),
)
ODD = (1000, 1001, 1003)
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
LONG = {"f16": "float16", "bf16": "bfloat16"}


class Built:
    """A form that was assembled and loaded, or the error that it ended with."""

    def __init__(self, parameters: T4Parameters) -> None:
        self.parameters = parameters
        self.function: Function | None = None
        self.reduce: Function | None = None
        self.error = ""
        self.seconds = 0.0
        self.kernels: list[CompiledKernel] = []

    def assemble(self, arch: str, capability: tuple[int, int]) -> Built:
        start = time.perf_counter()
        try:
            if not self.parameters.fits(capability):
                raise ValueError(f"{self.parameters.dynamic_shared_bytes} bytes of shared memory are too many here")
            self.kernels.append(compiled(self.parameters.render(), "t4", arch, capability))
            if self.parameters.split_k:
                ptx = splitk_reduce.render(self.parameters.c_dtype)
                self.kernels.append(compiled(ptx, "splitk_reduce", arch, capability))
        except Exception as error:
            self.error = one_line(error)
        self.seconds = time.perf_counter() - start
        return self

    def load(self, context: Context) -> None:
        if self.error:
            return
        try:
            self.function = load(self.kernels[0], context, dynamic_shared_bytes=self.parameters.dynamic_shared_bytes)
            if self.parameters.split_k:
                self.reduce = load(self.kernels[1], context)
        except Exception as error:
            self.error = one_line(error)

    def launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        stream: int,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        splits: int = 1,
        workspace: int = 0,
    ) -> None:
        """C = alpha·A@B + beta·C; a row-major operand has stride 1 in its last dimension, else in its first."""
        p = self.parameters
        assert self.function is not None
        (m, k), n = a.shape, b.shape[1]
        lda = a.stride(0) if p.a_layout == "row" else a.stride(1)
        ldb = b.stride(0) if p.b_layout == "row" else b.stride(1)
        values: tuple[Any, ...] = (a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k, lda, ldb, c.stride(0))
        values += (alpha, beta, 0, 0, 0)
        abi = PARAMETERS["t4"]
        if p.split_k:
            abi = PARAMETERS["t4_split_k"]
            values += (workspace, p.k_per_split(k, splits))
        grid, block = p.grid(m, n, splits), (p.threads, 1, 1)
        launch(self.function, grid, block, abi, values, dynamic_shared_bytes=p.dynamic_shared_bytes, stream=stream)
        if self.reduce is not None:
            values = (workspace, c.data_ptr(), m, n, c.stride(0), alpha, beta, splits, 0)
            block = (splitk_reduce.THREADS, 1, 1)
            launch(self.reduce, splitk_reduce.grid(m, n), block, PARAMETERS["splitk_reduce"], values, stream=stream)


def compiled(ptx: str, entry: str, arch: str, capability: tuple[int, int]) -> CompiledKernel:
    cubin, log, assembler = assemble(ptx, arch)
    resources = read_resources(log, cubin, entry, capability)
    return CompiledKernel(entry, arch, ptx, cubin, str(hash(ptx)), assembler, log, resources)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def operand(rows: int, columns: int, layout: str, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    """Normal values, with ``pad`` more elements in each row of the storage."""
    shape = (rows, columns) if layout == "row" else (columns, rows)
    stored = torch.randn(shape[0], shape[1] + pad, device="cuda", dtype=torch.float32).to(dtype)[:, : shape[1]]
    return stored if layout == "row" else stored.T


def check(built: Built, m: int, n: int, k: int, splits: int) -> None:
    """Compare some rows of two products with float64; sets ``error``."""
    p = built.parameters
    stream = torch.cuda.current_stream().cuda_stream
    workspace = torch.full(
        (max(1, splitk_reduce.workspace_bytes(m, n, splits)),), 0xFF, dtype=torch.uint8, device="cuda"
    )
    for alpha, beta, padded in ((1.0, 0.0, False), (2.0, -1.0, True)):
        am, an, ak = (m, n, k) if not padded else ODD
        a = operand(am, ak, p.a_layout, DTYPES[p.dtype], -(ak if p.a_layout == "row" else am) % 8)
        b = operand(ak, an, p.b_layout, DTYPES[p.dtype], -(an if p.b_layout == "row" else ak) % 8)
        c = torch.randn(am, an, device="cuda").to(DTYPES[p.c_dtype]) if beta else None
        if c is None:
            c = torch.full((am, an), float("nan"), device="cuda", dtype=DTYPES[p.c_dtype])
        before = c.clone()
        if padded and p.split_k:
            splits = 3
            workspace = torch.full(
                (splitk_reduce.workspace_bytes(am, an, splits),), 0xFF, dtype=torch.uint8, device="cuda"
            )
        extra = {"splits": splits, "workspace": workspace.data_ptr()} if p.split_k else {}
        built.launch(a, b, c, stream, alpha=alpha, beta=beta, **extra)
        torch.cuda.synchronize()
        rows = torch.cat([torch.randint(0, am, (14,)), torch.tensor([0, am - 1])]).cuda()
        exact = alpha * (a[rows].double() @ b.double())
        size = abs(alpha) * (a[rows].double().abs() @ b.double().abs())
        if beta:
            exact += beta * before[rows].double()
        rounding = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-23}[p.c_dtype]
        bound = size * (ak * 2.0**-24) + exact.abs() * rounding * 1.01 + 1e-6
        worst = ((c[rows].double() - exact).abs() / bound).nan_to_num(nan=float("inf")).max().item()
        if worst > 1:
            built.error = f"wrong: {worst:.3g} x bound at {am}x{an}x{ak}"
            return


def forms(args: argparse.Namespace, device: Device) -> list[T4Parameters]:
    a_layout, b_layout = args.layout.split("/")
    shapes = [dict(zip(SHAPE_NAMES, map(int, form.split(",")), strict=True)) for form in args.form or ()] or FORMS
    common: dict[str, Any] = {"dtype": args.dtype, "c_dtype": args.dtype, "a_layout": a_layout, "b_layout": b_layout}
    found = [T4Parameters(**{**shape, **common}) for shape in shapes]
    return [replace(x, blocks=x.resident_blocks(device.sm_count, device.compute_capability)) for x in found]


def time_square(good: list[Built], size: int, context: Context, args: argparse.Namespace) -> dict[str, float]:
    """Print the table of one size; returns TFLOP/s by label."""
    dtype = DTYPES[args.dtype]
    a_layout, b_layout = args.layout.split("/")
    sets = set_count(6 * size * size, context.device.l2_bytes, limit=8)
    a = [operand(size, size, a_layout, dtype) for _ in range(sets)]
    b = [operand(size, size, b_layout, dtype) for _ in range(sets)]
    c = [torch.empty(size, size, device="cuda", dtype=dtype) for _ in range(sets)]
    top = Ceiling(context, LONG[args.dtype])
    contenders: list[Callable[[int, int], None]] = [top.work]
    names = ["mma.sync ceiling"]
    peer, _ = find_peer("auto", LONG[args.dtype])
    if peer is not None:
        p = peer
        # cuBLAS multiplies the stored, packed matrices as they lie: as fast as their transposes, and square
        contenders.append(lambda i, s: p.gemm(a[i].data_ptr(), b[i].data_ptr(), c[i].data_ptr(), size, size, size, s))
        names.append(peer.name)
    for built in good:
        contenders.append(lambda i, s, built=built: built.launch(a[i], b[i], c[i], s))  # type: ignore[misc]
        names.append(built.parameters.label)
    times = time_interleaved(contenders, sets=sets, rounds=args.rounds)
    torch.cuda.synchronize()
    flops = 2.0 * size**3
    rates = {name: flops / t.us / 1e6 for name, t in zip(names, times, strict=True)}
    rates[names[0]] = top.flops / times[0].us / 1e6
    ceiling_rate, peer_us = rates[names[0]], times[1].us if peer is not None else float("nan")
    cycles = top.cycles()
    per_mma = cycles / (ceiling.TURNS * ceiling.TILES * ceiling.BLOCKS_PER_SM * ceiling.WARPS / 4)
    clock = cycles / times[0].us
    print(
        f"\n{size} cubed, {args.dtype}, {args.layout}: ceiling {ceiling_rate:.0f} TFLOP/s, "
        f"{per_mma:.2f} cycles an mma and quarter of an SM, {clock:.0f} MHz"
    )
    registers = {x.parameters.label: x.function.registers for x in good if x.function is not None}
    for name in sorted(names[1:], key=lambda x: -rates[x]):
        t = times[names.index(name)]
        share = t.ratio * flops / top.flops  # of the ceiling in the same round: the clock drifts between rounds
        print(
            f"  {rates[name]:7.1f} TF {share:6.3f} of ceiling {peer_us / t.us:6.3f} x cuBLAS "
            f"{t.us:9.1f} us [{t.us_min:.1f} .. {t.us_max:.1f}] {registers.get(name, 0):4d} regs  {name}"
        )
    sys.stdout.flush()
    return rates


def time_deep(context: Context, pool: concurrent.futures.Executor, args: argparse.Namespace) -> None:
    m, n, k = DEEP
    dtype = DTYPES[args.dtype]
    a_layout, b_layout = args.layout.split("/")
    common: dict[str, Any] = {
        "dtype": args.dtype,
        "c_dtype": args.dtype,
        "a_layout": a_layout,
        "b_layout": b_layout,
        "split_k": True,
    }
    tries = [(T4Parameters(**{**dict(zip(SHAPE_NAMES, s, strict=True)), **common}), splits) for s, splits in DEEP_FORMS]
    device = context.device
    all_built = list(pool.map(lambda x: Built(x[0]).assemble(device.arch, device.compute_capability), tries))
    sets = set_count(2 * (m + n) * k, device.l2_bytes)
    a = [operand(m, k, a_layout, dtype) for _ in range(sets)]
    b = [operand(k, n, b_layout, dtype) for _ in range(sets)]
    c = [torch.empty(m, n, device="cuda", dtype=dtype) for _ in range(sets)]
    space = torch.empty(splitk_reduce.workspace_bytes(m, n, 256), dtype=torch.uint8, device="cuda")
    contenders: list[Callable[[int, int], None]] = []
    names: list[str] = []
    peer, _ = find_peer("auto", LONG[args.dtype])
    if peer is not None:
        p = peer
        contenders.append(lambda i, s: p.gemm(a[i].data_ptr(), b[i].data_ptr(), c[i].data_ptr(), m, n, k, s))
        names.append(peer.name)
    for built, (_, splits) in zip(all_built, tries, strict=True):
        built.load(context)
        if not built.error:
            guarded_check(built, m, n, k, splits[0])
        if built.error:
            print(f"  failed  {built.parameters.label}: {built.error}")
            continue
        for count in splits:
            contenders.append(
                lambda i, s, built=built, count=count: built.launch(  # type: ignore[misc]
                    a[i], b[i], c[i], s, splits=count, workspace=space.data_ptr()
                )
            )
            names.append(f"{built.parameters.label}, {count} splits")
    times = time_interleaved(contenders, sets=sets, rounds=args.rounds)
    print(f"\n{m}x{n}x{k}, {args.dtype}, {args.layout}, inputs rotated over {sets} sets")
    peer_us = times[0].us if peer is not None else float("nan")
    for t, name in sorted(zip(times, names, strict=True), key=lambda x: x[0].us):
        print(f"  {t.us:7.2f} us [{t.us_min:.2f} .. {t.us_max:.2f}] {peer_us / t.us:6.3f} x cuBLAS  {name}")


def guarded_check(built: Built, m: int, n: int, k: int, splits: int = 1) -> None:
    try:
        check(built, m, n, k, splits)
    except Exception as error:
        built.error = one_line(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", action="append", help="block_m,block_n,block_k,warp_m,warp_n,stages,group_m")
    parser.add_argument("--layout", default="row/row")
    parser.add_argument("--dtype", default="bf16", choices=("f16", "bf16"))
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-deep", action="store_true", help="leave out the split-K shape")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")  # makes torch's context, which is the device's primary one, current
    context = current_context()
    device = context.device
    print(f"{device.name}, {device.sm_count} SMs, driver {device.driver_version}, torch {torch.__version__}")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        builds = pool.map(
            lambda p: Built(p).assemble(device.arch, device.compute_capability),
            forms(args, device),
        )
        good: list[Built] = []
        for built in builds:
            built.load(context)
            if not built.error:
                guarded_check(built, 1024, 1024, 1024)
            if built.error:
                print(f"  failed  {built.parameters.label}: {built.error}")
            else:
                good.append(built)
                local = built.function.local_bytes if built.function is not None else 0
                print(f"  checked {built.parameters.label}{f', {local} bytes of local memory' if local else ''}")
        print(f"assembled and checked after {time.perf_counter() - start:.1f} s", flush=True)
        for size in args.sizes:
            time_square(good, size, context, args)
        if not args.no_deep:
            time_deep(context, pool, args)
    print(f"\n{time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
