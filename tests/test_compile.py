"""The compile path without a GPU: resources and machine code of every rung, the assemblers, the disk cache."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ladder_forms import forms

from numba_gemm.catalog import LADDER, kernels_for
from numba_gemm.compile import assembler, cache, compile_kernel, compiler, kernel_ptx
from numba_gemm.compile.occupancy import REGISTERS_PER_SM, occupancy, sm_limits
from numba_gemm.compile.resources import elf_section_sizes, read_resources
from numba_gemm.compile.sass import disassemble, parse_sass
from numba_gemm.errors import CompileError

ARCHS = [(8, 0), (9, 0), (12, 0)]
#: The rungs with a fixed list of forms; v8 makes one for each problem, tests/fp32/test_v8_compiled.py has some of them.
RUNGS = [name for name in kernels_for("float32") if LADDER[name].select is None]
#: What the tiles of A and B take.
SHARED_BYTES = {
    "v1": 0,
    "v2": 0,
    "v3": 4 * (32 * 32 + 32 * 33),
    "v4": 4 * 2 * 64 * 8,
    "v5": 4 * 2 * 128 * 8,
    "v6": 4 * 2 * 128 * 8,
    "v7": 4 * 2 * 128 * 16,
}


@pytest.mark.parametrize(("name", "config", "arch"), forms(RUNGS, ARCHS))
def test_no_rung_spills_and_shared_memory_is_what_the_tiles_take(name, config, arch):
    spec = LADDER[name]
    resources = compile_kernel(spec, config, arch).resources
    assert not resources.uses_local_memory
    blocks = min(spec.min_blocks_per_sm, sm_limits(arch).warps * 32 // spec.threads)
    limit = REGISTERS_PER_SM // (spec.threads * blocks)
    assert 10 <= resources.registers <= min(255, limit)
    assert resources.shared_bytes == SHARED_BYTES[name]


#: Shared loads in the main loop of each rung, by width, for this many FFMA.
MAIN_LOOPS = {
    "v3": ({"LDS": 64}, 32),
    "v5": ({"LDS": 16}, 64),
    "v6": ({"LDS.128": 4}, 64),
    "v7": ({"LDS.128": 6}, 128),
}


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("name", MAIN_LOOPS)
def test_main_loop_loads_per_fma(name, arch):
    loads, fmas = MAIN_LOOPS[name]
    for config in LADDER[name].configs:
        if "column" in dict(config).values():
            continue  # ptxas may part the loop there; tests/fp32/test_layouts.py counts the whole kernel's
        mix = disassemble(compile_kernel(LADDER[name], config, arch).cubin).main_loop_mix()
        assert mix["FFMA"] >= fmas
        steps = mix["FFMA"] / fmas
        assert {width: mix[width] / steps for width in ("LDS", "LDS.64", "LDS.128") if mix[width]} == loads


@pytest.mark.parametrize(("name", "config", "arch"), forms(["v6", "v7"], ARCHS))
def test_the_vector_form_moves_16_bytes_and_the_scalar_form_4(name, config, arch):
    mix = disassemble(compile_kernel(LADDER[name], config, arch).cubin).mix()
    if dict(config)["vector_width"] == 4:
        assert mix["LDG.128"] >= 2
        assert mix["STG.128"] >= 16
        assert mix["STG"] == 0
    else:
        assert mix["LDG.128"] == mix["STG.128"] == 0
        assert mix["LDG"] >= 8
        assert mix["STG"] >= 64


@pytest.mark.parametrize(("name", "config", "arch"), forms(RUNGS, [(7, 5)]))
def test_turing_is_served_too(name, config, arch):
    assert not compile_kernel(LADDER[name], config, arch).resources.uses_local_memory


def test_ptx_has_one_entry_of_the_given_name():
    ptx = kernel_ptx(LADDER["v6"], LADDER["v6"].configs[0], (8, 0))
    assert re.findall(r"\.entry (\w+)\(", ptx) == ["v6_vector_width4"]
    assert "NumbaEnv" not in ptx


# --- assemblers ---------------------------------------------------------------------------------------------------

ADD_ONE = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry add_one(.param .u64 p)
{
    .reg .b64 %address;
    .reg .b32 %value;
    ld.param.u64 %address, [p];
    ld.global.u32 %value, [%address];
    add.s32 %value, %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""


def installed(name):
    try:
        assembler.ASSEMBLERS[name](ADD_ONE, "sm_80")
    except assembler.AssemblerMissingError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["nvjitlink", "ptxas"])
def test_each_assembler_gives_a_cubin_and_a_report(name, monkeypatch):
    missing = installed(name)
    if missing:
        pytest.skip(missing)
    monkeypatch.setenv("NUMBA_GEMM_ASSEMBLER", name)
    cubin, log, used = assembler.assemble(ADD_ONE, "sm_80")
    assert used == name
    assert ".text.add_one" in elf_section_sizes(cubin)
    resources = read_resources(log, cubin, "add_one", (8, 0))
    assert 2 <= resources.registers <= 16
    assert not resources.uses_local_memory


@pytest.mark.parametrize("name", ["nvjitlink", "ptxas"])
def test_refused_ptx_shows_the_line_and_keeps_the_text(name, monkeypatch):
    missing = installed(name)
    if missing:
        pytest.skip(missing)
    monkeypatch.setenv("NUMBA_GEMM_ASSEMBLER", name)
    broken = ADD_ONE.replace("add.s32 %value", "add.s99 %value")
    with pytest.raises(CompileError, match="refused the PTX for sm_80") as caught:
        assembler.assemble(broken, "sm_80")
    assert re.search(r"> +11 \|\s+add\.s99", str(caught.value))
    assert Path(caught.value.ptx_path).read_text() == broken
    os.unlink(caught.value.ptx_path)


def test_no_assembler_says_what_to_install(monkeypatch):
    def absent(ptx, arch):
        raise assembler.AssemblerMissingError("not here")

    monkeypatch.setattr(assembler, "ASSEMBLERS", {"one": absent, "two": absent})
    with pytest.raises(CompileError, match=r"one: not here; two: not here.*pip install 'numba-gemm\[cu13\]'"):
        assembler.assemble(ADD_ONE, "sm_80")


def test_the_next_assembler_stands_in(monkeypatch):
    def absent(ptx, arch):
        raise assembler.AssemblerMissingError("not here")

    monkeypatch.setattr(assembler, "ASSEMBLERS", {"one": absent, "two": lambda ptx, arch: (b"cubin", "log")})
    assert assembler.assemble(ADD_ONE, "sm_80") == (b"cubin", "log", "two")


def test_an_unknown_assembler_is_named(monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_ASSEMBLER", "gas")
    with pytest.raises(CompileError, match="'gas' is not one of nvjitlink, ptxas, driver"):
        assembler.assemble(ADD_ONE, "sm_80")


# --- the disk cache -----------------------------------------------------------------------------------------------

SPEC, CONFIG, ARCH = LADDER["v1"], (), (8, 0)


@pytest.fixture
def counted(monkeypatch):
    """How often the compiler runs."""
    calls = []
    compile_once = compiler._compile

    def count(*arguments):
        calls.append(arguments)
        return compile_once(*arguments)

    monkeypatch.setattr(compiler, "_compile", count)
    return calls


def forget():
    compiler._kernels.clear()


def test_a_second_process_reads_the_first_ones_kernel(kernel_cache, counted):
    first = compile_kernel(SPEC, CONFIG, ARCH)
    forget()
    assert compile_kernel(SPEC, CONFIG, ARCH) == first
    assert len(counted) == 1
    assert [path.suffix for path in kernel_cache.iterdir()] == [".kernel"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: data.replace(b"numba_gemm kernel 1", b"numba_gemm kernel 0"),
    ],
    ids=["empty", "head only", "cut", "longer", "last bit", "header bit", "old format"],
)
def test_a_damaged_entry_is_rebuilt(kernel_cache, counted, damage):
    first = compile_kernel(SPEC, CONFIG, ARCH)
    (path,) = kernel_cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    forget()
    assert compile_kernel(SPEC, CONFIG, ARCH) == first
    assert len(counted) == 2
    forget()
    assert compile_kernel(SPEC, CONFIG, ARCH) == first
    assert len(counted) == 2


def test_another_kernels_entry_under_this_name_is_not_trusted(kernel_cache, counted):
    compile_kernel(SPEC, CONFIG, ARCH)
    (path,) = kernel_cache.iterdir()
    other = compile_kernel(LADDER["v2"], (), ARCH)
    path.write_bytes((kernel_cache / f"{other.digest}.kernel").read_bytes())
    forget()
    assert compile_kernel(SPEC, CONFIG, ARCH).entry == "v1"
    assert len(counted) == 3


@pytest.mark.parametrize("change", ["source", "toolchain", "arch", "assembler"])
def test_a_stale_entry_is_another_entry(kernel_cache, monkeypatch, change):
    def digest(arch=ARCH):
        compiler._digest.cache_clear()
        return compiler._digest(SPEC, CONFIG, arch)

    before = digest()
    assert digest() == before
    if change == "source":
        monkeypatch.setattr(compiler, "_source", lambda module: f"# edited {module}")
    elif change == "toolchain":
        monkeypatch.setattr(compiler, "_toolchain", lambda: "numba-cuda 99")
    elif change == "assembler":
        monkeypatch.setenv("NUMBA_GEMM_ASSEMBLER", "ptxas")
    assert digest((8, 6) if change == "arch" else ARCH) != before
    compiler._digest.cache_clear()


def _compile_in_a_process(directory):
    """The kernel, and how often this process compiled it."""
    os.environ["NUMBA_GEMM_CACHE_DIR"] = directory
    compiler._kernels.clear()
    compiled = []
    original = compiler._compile
    compiler._compile = lambda *arguments: compiled.append(1) or original(*arguments)
    try:
        return compile_kernel(SPEC, CONFIG, ARCH), len(compiled)
    finally:
        compiler._compile = original


def test_concurrent_processes_share_one_sound_entry(kernel_cache):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        done = pool.map(_compile_in_a_process, [str(kernel_cache)] * 6, chunksize=1)
    kernels, compiled = zip(*done, strict=True)
    assert sum(compiled) == 1, "one compiles, the others wait for it"
    assert all(kernel == kernels[0] for kernel in kernels)
    assert [path.suffix for path in kernel_cache.iterdir()] == [".kernel"]
    assert cache.load(kernels[0].digest) == kernels[0]


def test_where_files_cannot_be_locked_each_process_compiles(kernel_cache, monkeypatch, counted):
    monkeypatch.setattr(cache, "fcntl", None)
    compile_kernel(SPEC, CONFIG, ARCH)
    assert len(counted) == 1
    assert [path.suffix for path in kernel_cache.iterdir()] == [".kernel"]


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(blocked / "kernels"))
    monkeypatch.setattr(compiler, "_kernels", {})
    assert compile_kernel(SPEC, CONFIG, ARCH).entry == "v1"
    assert "could not keep compiled kernel v1" in caplog.text
    assert "set NUMBA_GEMM_CACHE_DIR to a folder that can be written" in caplog.text


def test_the_empty_name_turns_the_cache_off(monkeypatch, counted):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "")
    for _ in range(2):
        monkeypatch.setattr(compiler, "_kernels", {})
        compile_kernel(SPEC, CONFIG, ARCH)
    assert len(counted) == 2
    assert cache.clear() == 0


def test_clearing_removes_the_entries(kernel_cache):
    compile_kernel(SPEC, CONFIG, ARCH)
    assert cache.clear() == 1
    assert list(kernel_cache.iterdir()) == []


def test_a_cached_kernel_is_loaded_without_numba(kernel_cache):
    """The first product of a new process must not pay for importing the compiler."""
    compile_kernel(SPEC, CONFIG, ARCH)
    program = (
        "import sys\n"
        "from numba_gemm.catalog import LADDER\n"
        "from numba_gemm.compile import compile_kernel\n"
        f"assert compile_kernel(LADDER['v1'], {CONFIG!r}, {ARCH!r}).cubin\n"
        "assert 'numba' not in sys.modules and 'llvmlite' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ})


# --- reports ------------------------------------------------------------------------------------------------------

SASS = """
\t.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_outer:
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;
.L_inner:
        /*0020*/                   LDS.128 R8, [R3] ;
        /*0030*/                   FFMA R0, R8, R9, R0 ;
        /*0040*/                   FFMA R1, R8, R9, R1 ;
        /*0050*/               @P1 BRA `(.L_inner) ;
        /*0060*/              @!P2 BRA `(.L_outer) ;
        /*0070*/                   FFMA R5, R5, R6, R7 ;
        /*0080*/                   EXIT ;
        /*0090*/                   BRA 0x90;
        /*00a0*/                   NOP;
"""


def test_the_main_loop_is_the_innermost_one_that_multiplies():
    report = parse_sass(SASS)
    assert dict(report.main_loop_mix()) == {"LDS.128": 1, "FFMA": 2, "BRA": 1}
    assert report.mix()["FFMA"] == 3
    assert report.mix()["LDG.128"] == 1
    assert "NOP" not in report.mix()


def test_plain_branch_addresses_are_understood():
    plain = SASS.replace("`(.L_inner)", "0x20").replace("`(.L_outer)", "0x10")
    assert parse_sass(plain).main_loop_mix() == parse_sass(SASS).main_loop_mix()


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "limited_by"),
    [
        # From NVIDIA's occupancy calculator.
        ((9, 0), 256, 128, 8192, 2, "registers"),
        ((9, 0), 128, 168, 16384, 3, "registers"),
        ((9, 0), 1024, 16, 0, 2, "warps"),
        ((8, 0), 128, 32, 40960, 4, "shared memory"),
        ((7, 5), 1024, 32, 0, 1, "warps"),
        ((9, 0), 32, 16, 0, 32, "blocks"),
    ],
)
def test_occupancy(arch, threads, registers, shared, blocks, limited_by):
    result = occupancy(arch, threads=threads, registers=registers, shared_bytes=shared)
    assert (result.blocks, result.limited_by) == (blocks, limited_by)
    assert result.warps == blocks * threads // 32


def test_a_kernel_from_the_cache_is_there_without_numba(kernel_cache):
    """A new process that finds its kernel on disk imports no compiler, though v8's helpers lie among intrinsics."""
    program = (
        "import sys\n"
        "from numba_gemm.choose import choose\n"
        "from numba_gemm.compile import compile_kernel\n"
        "from numba_gemm.problem import Problem\n"
        "problem = Problem.packed(256, 256, 256)\n"
        "spec, config = choose(problem, arch=(9, 0), sm_count=132)\n"
        "for launch in spec.plan(problem, config).launches:\n"
        "    compile_kernel(launch.spec, launch.config, (9, 0))\n"
        "print(spec.name, 'numba' in sys.modules)\n"
    )
    said = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in "12"]
    assert [done.stdout.split() for done in said] == [["v8", "True"], ["v8", "False"]]
