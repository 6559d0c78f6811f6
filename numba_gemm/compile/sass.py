"""The machine code of a cubin: disassembled, split into loops, and counted by instruction class. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from numba_gemm.compile.assembler import find_tool
from numba_gemm.errors import CompileError

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T0-9]\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);", re.M)


@dataclass(frozen=True)
class SassInstruction:
    """One machine instruction: byte address, opcode with modifiers (``"LDS.128"``) and operand text."""

    address: int
    opcode: str
    operands: str


@dataclass(frozen=True)
class SassReport:
    """A kernel's machine code.

    Attributes
    ----------
    instructions : in address order.
    main_loop : the instructions of the innermost loop that multiplies most, empty if the kernel has no loop.
    text : the disassembler's output.
    """

    instructions: tuple[SassInstruction, ...]
    main_loop: tuple[SassInstruction, ...]
    text: str

    def mix(self) -> Counter[str]:
        """How often each instruction class stands in the kernel."""
        return instruction_mix(self.instructions)

    def main_loop_mix(self) -> Counter[str]:
        """How often each instruction class stands in the main loop."""
        return instruction_mix(self.main_loop)


def disassemble(cubin: bytes) -> SassReport:
    """Disassemble a cubin that holds one kernel.

    Raises
    ------
    CompileError : if no disassembler is installed, with the command that brings one, or if it fails.
    """
    program = find_tool("nvdisasm") or find_tool("cuobjdump")
    if program is None:
        raise CompileError(
            "no disassembler was found; install one with: pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        options = ["-c", "-hex"] if Path(program).name == "nvdisasm" else ["-sass"]
        done = subprocess.run([program, *options, path], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{program} failed: {done.stderr.strip()}", log=done.stderr)
    return parse_sass(done.stdout)


def parse_sass(text: str) -> SassReport:
    """The instructions and main loop of disassembled machine code."""
    labels = _label_addresses(text)
    instructions = tuple(
        SassInstruction(int(address, 16), opcode, operands.strip())
        for address, opcode, operands in _INSTRUCTION.findall(text)
    )
    return SassReport(instructions, _main_loop(instructions, labels), text)


def _label_addresses(text: str) -> dict[str, int]:
    """Label → address of the instruction that follows it (nvdisasm writes labels, cuobjdump plain addresses)."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        label = re.match(r"^\s*(\.L_\w+):", line)
        if label:
            waiting.append(label.group(1))
            continue
        instruction = re.match(r"^\s+/\*([0-9a-f]{4,})\*/\s+\S", line)
        if instruction and waiting:
            for name in waiting:
                labels[name] = int(instruction.group(1), 16)
            waiting.clear()
    return labels


_MULTIPLIES = ("FFMA", "HMMA", "HGMMA", "IMMA", "DMMA", "QMMA", "QGMMA", "DFMA", "HFMA2")


def _main_loop(instructions: tuple[SassInstruction, ...], labels: dict[str, int]) -> tuple[SassInstruction, ...]:
    """The backward branch with the most multiplies in the range it repeats; a loop round another is not looked at."""
    loops: list[tuple[SassInstruction, ...]] = []
    for branch in instructions:
        if not branch.opcode.startswith("BRA"):
            continue
        target = _branch_target(branch.operands, labels)
        if target is None or target >= branch.address:
            continue
        loop = tuple(i for i in instructions if target <= i.address <= branch.address)
        # A wait that the assembler moved behind the kernel's end jumps back across it: no loop.
        if _multiplies(loop) and not any(i.opcode == "EXIT" for i in loop):
            loops.append(loop)
    inner = [loop for loop in loops if not any(_inside(other, loop) for other in loops)]
    return max(inner, key=lambda loop: (_multiplies(loop), -len(loop)), default=())


def _multiplies(loop: tuple[SassInstruction, ...]) -> int:
    return sum(instruction.opcode.startswith(_MULTIPLIES) for instruction in loop)


def _inside(inner: tuple[SassInstruction, ...], outer: tuple[SassInstruction, ...]) -> bool:
    """Whether one loop is a part of another."""
    begins_later, ends_sooner = inner[0].address >= outer[0].address, inner[-1].address <= outer[-1].address
    return begins_later and ends_sooner and len(inner) < len(outer)


def _branch_target(operands: str, labels: dict[str, int]) -> int | None:
    named = re.search(r"\.L_\w+", operands)
    if named:
        return labels.get(named.group(0))
    plain = re.search(r"0x([0-9a-f]+)", operands)
    return int(plain.group(1), 16) if plain else None


def instruction_mix(instructions: tuple[SassInstruction, ...]) -> Counter[str]:
    """Instructions by class: FFMA, LDS, LDS.64, LDS.128, LDG, LDG.128, HMMA.16816, LDSM, LDGSTS, BAR, other …"""
    return Counter(_class_of(i.opcode) for i in instructions if not i.opcode.startswith("NOP"))


def _class_of(opcode: str) -> str:
    name, *modifiers = opcode.split(".")
    if name in {"LDS", "STS", "LDG", "STG", "LDL", "STL", "LD", "ST"}:
        width = next((m for m in modifiers if m in {"64", "128"}), None)
        return f"{name}.{width}" if width else name
    if name == "LDGSTS":
        return "LDGSTS"
    if name in {"HMMA", "IMMA", "DMMA", "QMMA"}:
        return f"{name}.{modifiers[0]}" if modifiers else name
    if name in {"FFMA", "FMUL", "FADD", "LDSM", "STSM", "HGMMA", "QGMMA", "BAR", "BRA", "SHFL", "FFMA2"}:
        return name
    return "other"
