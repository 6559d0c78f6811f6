"""w2: right on the emulator in every form, refusals, the assembler's view of it, and every fault that one can seed."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from w2_problems import run

from numba_gemm import emulator
from numba_gemm.compile.assembler import find_tool
from numba_gemm.compile.sass import disassemble
from numba_gemm.errors import KernelConstraintError
from numba_gemm.tensorcore.w2 import W2Parameters
from numba_gemm.validate import check

SMALL = {"block_m": 128, "block_n": 64, "stages": 2}
ONE = {"block_m": 64, "block_n": 64, "stages": 2, "consumers": 1}
PING_PONG = {"block_m": 64, "block_n": 64, "stages": 3, "schedule": "pingpong"}
ELEMENTS = {"store": "elements"}


def form(dtype: str = "f16", **values) -> W2Parameters:
    return W2Parameters(**({"dtype": dtype, "c_dtype": dtype} | values))


def right(p: W2Parameters, m: int, n: int, k: int, **options) -> emulator.Report:
    c, expected, report = run(p, m, n, k, **options)
    verdict = check(c, expected, exact=bool(options.get("exact")))
    assert verdict, verdict.message
    return report


# --- products


@pytest.mark.parametrize("c_layout", ["row", "column"])
@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize("a_layout", ["row", "column"])
@pytest.mark.parametrize("store", ["tma", "elements"])
def test_every_layout(a_layout, b_layout, c_layout, store):
    p = form(a_layout=a_layout, b_layout=b_layout, c_layout=c_layout, store=store, **SMALL)
    right(p, 136, 72, 136, blocks=1)
    right(p, 72, 136, 72, exact=True)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (128, 64, 64),  # one tile, one k-block
        (1, 1, 1),
        (127, 63, 128),
        (129, 65, 65),  # four tiles, each but the first nearly empty
        (256, 128, 256),  # tiles and k-blocks come out even
        (130, 200, 192),  # an odd number of k-blocks: phases differ from tile to tile
        (64, 8, 520),
    ],
)  # fmt: skip
@pytest.mark.parametrize("blocks", [0, 1])
def test_shapes(m, n, k, blocks):
    right(form(**SMALL, **ELEMENTS), m, n, k, blocks=blocks)
    right(form("bf16", **SMALL), m, n, k, blocks=blocks)


@pytest.mark.parametrize(
    "values",
    [
        {"block_n": 256, "stages": 4},
        {"block_m": 256, "block_n": 128, "stages": 3},
        {"block_n": 192, "stages": 3},
        {"block_m": 256, "block_n": 192, "stages": 3},
        {"block_m": 192, "block_n": 128, "consumers": 3, "stages": 2},
        {"block_n": 128, "stages": 2},
        {"block_m": 64, "block_n": 256, "stages": 2},  # consumers side by side
        {"block_m": 64, "block_n": 256, "stages": 2, "consumers": 1},
        {"block_m": 64, "block_n": 128, "stages": 2, "consumers": 1},
    ],
)  # fmt: skip
def test_tiles(values):
    p = form("bf16", **values)
    right(p, p.block_m + 8, p.block_n + 8, 72, blocks=2)


@pytest.mark.parametrize("c_layout", ["row", "column"])
@pytest.mark.parametrize("store", ["tma", "elements"])
@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize("block_n", [8, 16, 32])
def test_narrow_tiles(block_n, b_layout, store, c_layout):
    p = form(block_n=block_n, b_layout=b_layout, store=store, c_layout=c_layout, stages=2)
    right(p, 136, block_n - 1, 72, blocks=1)
    right(p, 64, 2 * block_n + 1, 200, blocks=1)


@pytest.mark.parametrize("c_layout", ["row", "column"])
@pytest.mark.parametrize("store", ["tma", "elements"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_alpha_and_beta(dtype, store, c_layout):
    p = form(dtype, store=store, c_layout=c_layout, **SMALL)
    for alpha, beta in ((1.0, 0.0), (-0.5, 0.0), (1.0, 1.0), (1.5, -2.0)):
        right(p, 129, 71, 70, blocks=1, alpha=alpha, beta=beta)


@pytest.mark.parametrize("c_layout", ["row", "column"])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_fp32_result(c_layout, beta):
    p = form("bf16", c_layout=c_layout, **ELEMENTS | SMALL | {"c_dtype": "f32"})
    for offset, line in ((0, 0), (1, 0), (0, 8), (1, 8)):
        right(p, 129, 71, 137, blocks=1, beta=beta, alpha=0.5, offset=offset, line=line)


@pytest.mark.parametrize("c_layout", ["row", "column"])
@pytest.mark.parametrize(("offset", "line"), [(0, 1), (1, 1), (0, 2), (1, 2), (3, 8)])
def test_elements_go_to_any_address(offset, line, c_layout):
    """Lines of C that begin at odd elements, at even ones, or now and then."""
    right(form(c_layout=c_layout, **SMALL, **ELEMENTS), 131, 69, 64, offset=offset, line=line)


@pytest.mark.parametrize("splits", [1, 2, 5])  # five parts of four k-blocks: one is empty
@pytest.mark.parametrize("values", [SMALL, PING_PONG, SMALL | {"cluster_m": 2}, SMALL | {"c_layout": "column"}])
def test_split_k(values, splits):
    right(form("bf16", split_k=True, **values, **ELEMENTS), 129, 70, 250, splits=splits, batch=2, blocks=4)


@pytest.mark.parametrize("values", [SMALL, SMALL | ELEMENTS, PING_PONG, SMALL | {"cluster_n": 2}])
def test_batches(values):
    right(form(**values), 129, 71, 72, batch=3, blocks=2)


@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize("a_layout", ["row", "column"])
@pytest.mark.parametrize("cluster", [{"cluster_m": 2}, {"cluster_n": 2}])
@pytest.mark.parametrize("values", [ONE, SMALL, PING_PONG], ids=["one", "two", "ping-pong"])
def test_clusters(values, cluster, a_layout, b_layout):
    """An odd number of tiles along either side, so that some CTA has no tile; shares of panels and of depth."""
    p = form("bf16", a_layout=a_layout, b_layout=b_layout, **values, **cluster)
    report = right(p, 2 * p.block_m + 8, 2 * p.block_n + 8, 200, blocks=2)
    # each CTA starts copies of its share only, which arrive in both
    units = p.work_units(2 * p.block_m + 8, 2 * p.block_n + 8)
    assert report.counters.tensor_load_bytes == units * 4 * p.stage_bytes


@pytest.mark.parametrize("tiles", range(1, 6))
def test_ping_pong(tiles):
    """Both consumers, an odd and an even number of tiles, k-blocks that are no multiple of the stages."""
    right(form(**PING_PONG), 64, 64 * tiles, 264, blocks=1)
    right(form(**PING_PONG, **ELEMENTS, c_layout="column"), 63, 64 * tiles - 1, 200, blocks=1)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_every_tile_once(group):
    """Groups of tile rows, the last one smaller."""
    right(form(**ONE, **ELEMENTS, group=group), 64 * 4 + 1, 64 * 3, 8, blocks=1)
    right(form(**ONE, **ELEMENTS, group=group, cluster_m=2), 64 * 4 + 1, 64 * 3, 8, blocks=4)


@pytest.mark.parametrize("keep", ["a", "b"])
def test_hints_change_nothing(keep):
    """Advice to L2 names the other operand, and the product stays what it is."""
    text = form(**SMALL, keep=keep, cluster_m=2).render()
    for name in "ab":
        advice = "kept" if name == keep else "streamed"
        assert re.search(rf"L2::cache_hint .*%map_{name}, .*, %{advice};", text)
    right(form(**SMALL, keep=keep, cluster_m=2), 264, 136, 136, exact=True)


def test_the_same_bits_whoever_computes_a_tile():
    p = form("bf16", **SMALL)
    first, *others = (run(p, 300, 200, 264, blocks=blocks)[0] for blocks in (0, 1, 5))
    for other in others:
        np.testing.assert_array_equal(first.view(np.uint16), other.view(np.uint16))


def test_nothing_conflicts_in_shared_memory():
    for values in ({"block_n": 256, "stages": 2}, SMALL | ELEMENTS, SMALL | {"c_layout": "column"}):
        counters = run(form(**values), 128, 256, 64)[2].counters
        assert counters.shared_store_conflicts == counters.shared_load_conflicts == 0


# --- the object


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "f32"}, "neither 'f16' nor 'bf16'"),
        ({"c_dtype": "bf16"}, "neither 'f16' nor 'f32'"),
        ({"block_k": 32}, "use 64"),
        ({"block_m": 96}, "block_m = 96"),
        ({"block_n": 48}, "block_n = 48"),
        ({"stages": 1}, "stages = 1"),
        ({"stages": 5}, "use fewer stages"),
        ({"consumers": 4}, "not 1, 2 or 3"),
        ({"consumers": 3}, "don't divide the tile"),
        ({"schedule": "pingpong", "consumers": 1}, "two consumers"),
        ({"cluster_m": 2, "cluster_n": 2}, "1x1, 2x1 or 1x2"),
        ({"block_n": 8, "b_layout": "column", "cluster_m": 2}, "multiple of 8 rows"),
        ({"block_m": 64, "block_n": 64}, "use fewer consumers"),
        ({"block_m": 256, "stages": 2}, "accumulators"),
        ({"split_k": True}, "store='elements'"),
        ({"c_dtype": "f32"}, "store='elements'"),
        ({"group": 0}, "group = 0"),
        ({"keep": "c"}, "keep 'c'"),
        ({"a_layout": "diagonal"}, "a_layout"),
    ],
)  # fmt: skip
def test_refusals(values, message):
    with pytest.raises(KernelConstraintError, match=re.escape(message)):
        form(**({"c_dtype": "f16"} | values))


def test_work_units():
    p = form(cluster_m=2, **ELEMENTS, split_k=True)
    assert p.work_units(129, 257, batch=3, splits=5) == 2 * 2 * 3 * 5
    assert p.work_units(257, 1) == 4
    assert [p.blocks(1000, resident) for resident in (132, 131, 1)] == [132, 130, 2]
    assert p.blocks(4, 132) == 4
    assert p.k_blocks_per_split(1000, 3) == 6
    with pytest.raises(KernelConstraintError, match="takes 1"):
        form().work_units(1, 1, splits=2)
    with pytest.raises(KernelConstraintError, match="must lie in"):
        form().work_units(2**31, 1)
    with pytest.raises(KernelConstraintError, match="split the batch"):
        form().work_units(2**20, 2**20, batch=2**20)


# --- the assembler

needs_ptxas = pytest.mark.skipif(find_tool("ptxas") is None, reason="ptxas is not installed")


@functools.cache
def assembled(text: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "w2.ptx"), Path(folder, "w2.cubin")
        source.write_text(text)
        command = [find_tool("ptxas"), "-arch=sm_90a", "-v", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return cubin.read_bytes() if cubin.is_file() else b"", done.stdout + done.stderr


FULL_SIZE = [
    {},
    {"cluster_m": 2},
    {"cluster_n": 2, "a_layout": "column", "b_layout": "column", "c_layout": "column"},
    {"store": "elements"},
    {"store": "elements", "c_layout": "column"},
    {"store": "elements", "split_k": True},
    {"store": "elements", "c_dtype": "f32"},
    {"block_m": 256, "block_n": 128},
    {"block_m": 256, "block_n": 192, "stages": 3},
    {"block_m": 192, "block_n": 192, "stages": 3, "consumers": 3},
    {"block_m": 64, "consumers": 1},
    {"block_n": 8, "stages": 8},
    {"block_m": 64, "schedule": "pingpong", "cluster_m": 2, "keep": "a"},
    {"block_m": 64, "block_n": 128, "stages": 8, "schedule": "pingpong", "split_k": True, "store": "elements"},
    {"block_m": 128, "block_n": 128, "stages": 6, "schedule": "pingpong"},
]


@needs_ptxas
@pytest.mark.parametrize("values", FULL_SIZE, ids=str)
def test_the_assembler_takes_it_without_a_word(values):
    """No products made to wait for one another, no setmaxnreg ignored, nothing spilt."""
    cubin, log = assembled(form("bf16", **values).render())
    assert cubin, log
    assert not re.search("warning|error|wgmma|setmaxnreg", log, re.I), log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


@needs_ptxas
@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="nvdisasm is not installed")
def test_the_main_loop_is_short():
    """Beside the four products of a k-block, only what waits, steps and gives back; on a whole warp's registers."""
    report = disassemble(assembled(form("bf16").render())[0])
    opcodes = [instruction.opcode.split(".")[0] for instruction in report.instructions]
    products = [i for i, opcode in enumerate(opcodes) if opcode == "HGMMA"]
    assert len(products) == 4
    assert products[-1] - products[0] <= 20
    assert opcodes.count("UTMALDG") == 5  # A, and four panels of B
    assert opcodes.count("UTMASTG") == 4
    assert "STL" not in opcodes


@needs_ptxas
@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize("schedule", ["cooperative", "pingpong"])
def test_no_fence_of_all_memory_in_a_cluster_s_main_loop(schedule):
    """`.release.cluster` on the arrival at the other CTA's barrier makes a MEMBAR of each one."""
    text = form("bf16", block_m=128, block_n=128, stages=6, cluster_m=2, schedule=schedule).render()
    slow = text.replace("mbarrier.arrive.shared::cluster.b64", "mbarrier.arrive.release.cluster.shared::cluster.b64")
    for source, fences in ((text, False), (slow, True)):
        opcodes = [one.opcode.split(".")[0] for one in disassemble(assembled(source)[0]).instructions]
        products = [i for i, opcode in enumerate(opcodes) if opcode == "HGMMA"]
        assert ("MEMBAR" in opcodes[products[0] : products[-1] + 40]) == fences


# --- seeded faults

FAULTY = W2Parameters(**SMALL)
FULL, EMPTY = FAULTY.barriers_offset, FAULTY.barriers_offset + 16
GIVE_BACK = "@%q mbarrier.arrive.shared::cta.b64 _, [%empty];"
GIVE_LAST = "@%gives_back mbarrier.arrive.shared::cta.b64 _, [%empty];"
TRY_FULL = f"mbarrier.try_wait.parity.shared::cta.b64 %p, [%full + {FULL}], %phase;"
TRY_EMPTY = "mbarrier.try_wait.parity.shared::cta.b64 %p, [%empty], %phase;"
PASS = "setp.eq.u32 %p, 0, 0;"
BYTES = f"[%full], {FAULTY.stage_bytes};"
WAIT_SUMS = f"wgmma.wait_group.sync.aligned 0;{' ' * 16}// the sums are there, and the last stage is read"
STILL = "bulk store still reads"
READ_WAIT = r"@%chief cp.async.bulk.wait_group.read 0;"
FAULTS = {
    "the producer expects bytes without arriving": (
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full]",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%full]",
        emulator.Deadlock, "1 of 1 arrivals and 0 bytes",
    ),
    "consumers never give stages back": (GIVE_BACK, "", emulator.Deadlock, "wait for parity"),
    "consumers keep a tile's last stage": (GIVE_LAST, "", emulator.Deadlock, "wait for parity"),
    "every thread gives back": (
        GIVE_LAST, GIVE_LAST.removeprefix("@%gives_back "), emulator.UnfinishedAsyncRead, "a wgmma still reads",
    ),
    "consumers start with the wrong parity": (
        "mov.u32         %phase, 0;", "mov.u32 %phase, 1;", emulator.Deadlock, "wait for parity",
    ),
    "the producer starts with the wrong parity": (
        "mov.u32         %phase, 1;", "mov.u32 %phase, 0;", emulator.Deadlock, "wait for parity",
    ),
    "the producer's parity never flips": (
        "@%p xor.b32     %phase, %phase, 1;", "", (emulator.Deadlock, emulator.UnwaitedAsyncCopy), "parity|copy",
    ),
    "nobody waits for the copies": (TRY_FULL, PASS, emulator.UnwaitedAsyncCopy, "its phase was not waited for"),
    "the producer does not wait for free stages": (
        TRY_EMPTY, PASS, emulator.UnwaitedAsyncCopy, "overwrite of data that a bulk copy",
    ),
    "fewer bytes expected": (
        BYTES, f"[%full], {FAULTY.stage_bytes - 128};", emulator.MbarrierMisuse, "128 bytes more",
    ),
    "more bytes expected": (
        BYTES, f"[%full], {FAULTY.stage_bytes + 128};", emulator.Deadlock, "128 bytes pending",
    ),
    "no fence after the initialisation": (
        "fence.mbarrier_init.release.cluster;", "", emulator.MissingProxyFence, "initialised without",
    ),
    "no barrier after the initialisation": ("bar.sync        0;", "", emulator.MbarrierMisuse, "nothing orders"),
    "every lane of the producer copies": ("@!%p bra        DONE;", "", emulator.MbarrierMisuse, "0 of 1 pending"),
    "no wgmma.fence": ("wgmma.fence.sync.aligned;", "", emulator.MissingWgmmaFence, "no wgmma.fence since"),
    "no commit": ("wgmma.commit_group.sync.aligned;", "", emulator.UnfinishedAsyncRead, "a wgmma still reads"),
    "a stage goes back while it is read": (
        "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;",
        emulator.UnfinishedAsyncRead, "a wgmma still reads",
    ),
    "sums are taken early": (
        f"{WAIT_SUMS}\n    {GIVE_LAST}", GIVE_LAST,
        (emulator.RegistersInFlight, emulator.UnfinishedAsyncRead), "wait",
    ),
    "no proxy fence before the store": (
        "fence.proxy.async.shared::cta;", "", emulator.MissingProxyFence, "without a fence.proxy.async",
    ),
    "only the storing thread fences": (
        "fence.proxy.async.shared::cta;", "@%chief fence.proxy.async.shared::cta;", emulator.MissingProxyFence,
        "without a fence.proxy.async",
    ),
    "no wait before the buffer is written again": (READ_WAIT, "", emulator.UnfinishedAsyncRead, STILL),
    "only the storing thread knows of that wait": (
        READ_WAIT + "\n    bar.sync        %named, 128;", READ_WAIT, emulator.UnfinishedAsyncRead, STILL,
    ),
}  # fmt: skip


def mutated(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new, 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults(fault):
    old, new, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message):
        run(FAULTY, 200, 136, 328, blocks=1, text=mutated(FAULTY.render(), old, new))


PANELS = W2Parameters(block_m=128, block_n=128, stages=2)
STORED = (
    r"fence.proxy.async.shared::cta;                  // what this thread wrote, the copy engine reads"
    "\n    @%chief cp.async.bulk.wait_group.read 0;        // the other buffer has been read\n"
)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (STORED, STORED.replace("@%chief cp.async.bulk.wait_group.read 0;", ""), emulator.UnfinishedAsyncRead),
        (
            STORED + "    bar.sync        %named, 128;",
            STORED,
            (emulator.SharedMemoryRace, emulator.UnfinishedAsyncRead),
        ),
    ],
)
def test_faults_between_panels(old, new, kind):
    """Two panels take turns: what closes each of them is needed."""
    text = PANELS.render()
    with pytest.raises(kind):
        run(PANELS, 128, 256, 64, blocks=1, text=text.replace(old, new))


def test_an_exit_before_the_store_has_read():
    text = FAULTY.render()
    last = text.rindex(READ_WAIT)
    with pytest.raises(emulator.EarlyExit, match="wait for its group first"):
        run(FAULTY, 128, 64, 64, text=text[:last] + text[last + len(READ_WAIT) :])


MAP = "mapa.shared::cluster.u32 %free, %free, %x;"
LEAVE = "barrier.cluster.arrive.release.aligned;\n    barrier.cluster.wait.acquire.aligned;\n    ret;"
GIVERS = "setp.lt.u32     %gives_back, %in_group, 2;"
EVERYONE = "mov.b16         %everyone, 3;"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (MAP, "", emulator.UnwaitedAsyncCopy),
        (MAP, MAP.replace("%x", "%rank"), emulator.UnwaitedAsyncCopy),
        (LEAVE, "ret;", emulator.EarlyExit),
        (GIVERS, GIVERS.replace("2;", "1;"), emulator.Deadlock),
        (EVERYONE, EVERYONE.replace("3", "1"), (emulator.Deadlock, emulator.MbarrierMisuse)),
        ("barrier.cluster.wait.acquire.aligned;", "", emulator.MbarrierMisuse),
    ],
)  # fmt: skip
def test_faults_in_a_cluster(old, new, kind):
    p = W2Parameters(**SMALL, cluster_m=2)
    with pytest.raises(kind):
        run(p, 256, 136, 328, blocks=2, text=mutated(p.render(), old, new))


def test_descriptors_without_the_rank():
    """In a cluster bits 24 and up of an address are the CTA's rank, and must not reach the leading offset."""
    p = form(block_m=128, block_n=128, stages=2, cluster_m=2)
    text = p.render()
    unmasked = re.sub(r"and\.b32 +%x, %x, 16383;", "", text)
    assert unmasked != text
    right(p, 256, 128, 72, exact=True)
    # the second CTA's wgmma reads past the end of B's tile, where the next stage is
    with pytest.raises(emulator.UnwaitedAsyncCopy, match=r"read of data .* by block \(1, 0, 0\).*wgmma"):
        run(p, 256, 128, 72, exact=True, text=unmasked)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("@%p bar.arrive  %other_turn, 256;", "", emulator.Deadlock),
        ("xor.b32         %phase, %phase, %y;", "", (emulator.Deadlock, emulator.UnwaitedAsyncCopy)),
        ("sub.u32         %stage, %x, %z;", "", (emulator.Deadlock, emulator.UnwaitedAsyncCopy)),
    ],
)  # fmt: skip
def test_faults_in_ping_pong(old, new, kind):
    p = W2Parameters(**PING_PONG)
    with pytest.raises(kind):
        run(p, 64, 256, 264, blocks=1, text=mutated(p.render(), old, new))
