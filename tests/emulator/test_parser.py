"""The text of PTX: every form of declaration, literal and operand, and errors that name the line."""

from __future__ import annotations

import harness
import numpy as np
import pytest

from numba_gemm import emulator
from numba_gemm.emulator.parser import parse


def test_module_with_everything_around_the_code():
    text = """//
// a comment
.version 8.7 .target sm_90a, debug
.address_size 64
.file 1 "a b.cu"
.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);
.extern .shared .align 16 .b8 dynamic[];
.common .global .align 8 .u64 environment;
.visible .global .align 4 .v4 .f32 quads[2];
.global .align 2 .b8 bytes[] = {1, 0x2, 'x'[0], 4};
"""
    text = (
        text.replace("'x'[0]", "0b11")
        + """
/* a comment
   of two lines */
.visible .entry k(.param .align 8 .b8 p[16], .param .u64 .ptr .global .align 16 q)
.maxntid 128, 1, 1
.minnctapersm 2
.maxnreg 64
{
    .pragma "nounroll";
    .reg .pred %p<3>; .reg .b32 %r<4>, named; .reg .f64 %fd<2>; .reg .b16 %rs<2>;
    .loc 1 3 7, function_name $L__info, inlined_at 1 2 3
$L__begin:
    mov.b32 named, 0x1F; mov.u32 %r1, 017; mov.u32 %r2, 0b101; mov.u32 %r3, -1U;
    mov.f64 %fd0, 0d3FF0000000000000; mov.f64 %fd1, 1.5e3;
    { .reg .b32 %r1; mov.u32 %r1, 7; }
    @!%p1 bra $L__end;
    ret;
$L__end:
    exit;
}
.section .debug_str { .b8 1, 2
   .b8 3 }
"""
    )
    module = parse(text)
    kernel = module.functions["k"]
    assert kernel.directives == {".maxntid": (128, 1, 1), ".minnctapersm": (2,), ".maxnreg": (64,)}
    assert [(p.name, p.size) for p in kernel.params] == [("p", 16), ("q", 8)]
    sizes = {v.name: (v.space, v.size, v.extern) for v in module.variables}
    assert sizes["dynamic"] == ("shared", 0, True)
    assert sizes["quads"] == ("global", 32, False)
    assert sizes["bytes"] == ("global", 4, False)
    assert module.variables[-1].initial == bytes([1, 2, 3, 4])
    assert emulator.kernel_names(text) == ["k"]


def test_inner_scopes_hide_registers_and_labels():
    body = """
    .reg .b32 %x; .reg .b64 %o; .reg .pred %p; ld.param.u64 %o, [o];
    mov.u32 %x, 1;
    { .reg .b32 %x; mov.u32 %x, 2;
      L: setp.ge.u32 %p, %x, 5; @%p bra M; add.u32 %x, %x, 1; bra L;
      M: st.global.u32 [%o], %x; }
    { .reg .b32 %x; mov.u32 %x, 9;
      L: setp.ge.u32 %p, %x, 12; @%p bra M; add.u32 %x, %x, 1; bra L;
      M: st.global.u32 [%o+4], %x; }
    st.global.u32 [%o+8], %x;
    """
    o = np.zeros(3, np.uint32)
    emulator.launch(harness.kernel_text(body, ".param .u64 o"), 1, 1, [o])
    assert o.tolist() == [5, 12, 1]


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        ("frobnicate.b32 %x, %x;", emulator.UnsupportedInstruction, "frobnicate"),
        ("add.u32 %x, %x, %y;", emulator.PtxSyntaxError, "not declared"),
        ("add.u32 %x, %x;", emulator.PtxSyntaxError, "operands"),
        ("add.u64 %x, %x, %x;", emulator.PtxSyntaxError, "%x"),
        ("bra NOWHERE;", emulator.PtxSyntaxError, "NOWHERE"),
        ("mov.u32 %x, 5", emulator.PtxSyntaxError, "expected"),
        ("mov.u32 %x, `;", emulator.PtxSyntaxError, "unexpected character"),
        ("tcgen05.wait::ld.sync.aligned;", emulator.UnsupportedInstruction, "tcgen05"),
        ("mov.u64 %z, 5;", emulator.PtxSyntaxError, "not declared"),
        (".frob .b32 q;", emulator.PtxSyntaxError, ".frob"),
    ],
)
def test_faults_name_the_line(statement, kind, message):
    body = f".reg .b32 %x;\nmov.u32 %x, 1;\n{statement}\nmov.u32 %x, 2;"
    with pytest.raises(kind, match=message) as caught:
        emulator.launch(harness.kernel_text(body), 1, 1, [])
    # a missing semicolon shows on the line after
    assert caught.value.line in (9, 9 if statement.endswith(";") else 10)
    assert caught.value.text


def test_calling_what_is_not_there():
    before = ".extern .func vprintf(.param .b64 f);"
    body = (
        ".param .b64 f; .reg .pred %p; .reg .b32 %t; mov.u32 %t, %tid.x; setp.gt.u32 %p, %t, 5; @%p call vprintf, (f);"
    )
    emulator.launch(harness.kernel_text(body, before=before), 1, 4, [])
    with pytest.raises(emulator.UnsupportedInstruction, match="vprintf is not defined"):
        emulator.launch(harness.kernel_text(body, before=before), 1, 8, [])


def test_naming_a_kernel():
    text = harness.kernel_text("ret;", name="one") + ".visible .entry two() { ret; }"
    emulator.launch(text, 1, 1, [], kernel="two")
    for name in (None, "three"):
        with pytest.raises(emulator.LaunchError, match="one"):
            emulator.launch(text, 1, 1, [], kernel=name)


def test_programs_are_cached():
    text = harness.kernel_text("ret;", name="cached")
    assert emulator.compile_program(text) is emulator.compile_program(text)
