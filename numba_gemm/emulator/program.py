"""A parsed module to a program: one list of callables, with registers, constants and variables laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .asynchronous import is_asynchronous, matrix_registers, watched
from .errors import LaunchError, PtxSyntaxError, UnsupportedInstruction
from .literals import immediate_bits
from .module import (
    WIDTHS,
    Addr,
    Function,
    Imm,
    Instruction,
    Module,
    Neg,
    Not,
    Operand,
    Reg,
    Register,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)
from .parser import parse
from .registers import KEYS

Run = Callable[[Any], Any]
Builder = Callable[["Decoder", Instruction], Any]
OPS: dict[str, Builder] = {}


def op(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder: it turns an instruction into the callable that executes it for a batch."""

    def register(builder: Builder) -> Builder:
        for name in names:
            OPS[name] = builder
        return builder

    return register


class Terminator:
    """An instruction after which the active threads may differ; `run(batch, pc)` says where they go.

    The result is the next pc of all active threads, or a list of (pc, threads) pairs.
    """

    def __init__(self, run: Callable[[Any, int], Any]) -> None:
        self.run = run


@dataclass(eq=False)
class Program:
    """What a launch needs of a kernel; made by `compile_program`."""

    module: Module
    kernel: Function
    code: list[Run] = field(default_factory=list)
    terminators: list[Terminator | None] = field(default_factory=list)
    next_terminator: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    entry_pc: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    constants: list[tuple[int, int, int]] = field(default_factory=list)
    shared_addresses: list[tuple[int, int, int]] = field(default_factory=list)
    specials: list[tuple[str, int, int]] = field(default_factory=list)
    addresses: list[tuple[Variable, int, int, int]] = field(default_factory=list)
    shared_bytes: int = 0
    shared_align: int = 16
    local_bytes: int = 0
    cell: int = 4
    param_bytes: int = 0
    asynchronous: bool = False
    matrix_registers: dict[int, int] = field(default_factory=dict)

    def text_of(self, pc: int) -> tuple[int, str]:
        line = self.instructions[pc].line
        return line, self.module.lines[line - 1]


def layout(variables: list[Variable], offset: int) -> int:
    """Give variables their offsets from `offset` on; returns the first byte past them."""
    for variable in variables:
        offset = -(-offset // variable.align) * variable.align
        variable.offset = offset
        offset += variable.size
    return offset


class Decoder:
    """State while the functions of one kernel are decoded."""

    def __init__(self, module: Module, kernel: Function) -> None:
        self.module = module
        self.program = Program(module, kernel)
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}
        self.constant_rows: dict[tuple[int, int], int] = {}
        self.shared_rows: dict[tuple[int, int], int] = {}
        self.special_rows: dict[tuple[str, int], int] = {}
        self.address_rows: dict[tuple[int, int, int], int] = {}
        self.function = kernel
        self.start = 0
        self.starts: dict[str, int] = {}
        self.returns: dict[str, int] = {}
        self.call_sites: dict[int, list[tuple[int, int, int]]] = {}
        self.variables = {variable.name: variable for variable in module.variables}

    # --- errors

    def unsupported(self, ins: Instruction, why: str = "") -> UnsupportedInstruction:
        message = f"{ins.name} is not supported" + (f": {why}" if why else "")
        return UnsupportedInstruction(message, ins.line, self.module.lines[ins.line - 1])

    def syntax(self, ins: Instruction, why: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"{ins.name}: {why}", ins.line, self.module.lines[ins.line - 1])

    # --- rows

    def new_row(self, bits: int) -> int:
        row = self.counts[bits]
        self.counts[bits] = row + 1
        return row

    def row_of(self, register: Register) -> int:
        if register.row < 0:
            register.row = self.new_row(register.bits)
        return register.row

    def constant(self, bits: int, value: int) -> int:
        key = (bits, value)
        row = self.constant_rows.get(key)
        if row is None:
            row = self.constant_rows[key] = self.new_row(bits)
            self.program.constants.append((bits, row, value))
        return row

    def shared_address(self, bits: int, offset: int) -> int:
        """The row of an address in the block's own shared memory: in a cluster it differs from block to block."""
        key = (bits, offset)
        row = self.shared_rows.get(key)
        if row is None:
            row = self.shared_rows[key] = self.new_row(bits)
            self.program.shared_addresses.append((offset, bits, row))
        return row

    def special(self, name: str, bits: int) -> int:
        key = (name, bits)
        row = self.special_rows.get(key)
        if row is None:
            row = self.special_rows[key] = self.new_row(bits)
            self.program.specials.append((name, bits, row))
        return row

    def address_row(self, ins: Instruction, symbol: Sym, bits: int) -> int:
        variable = symbol.variable or self.variables.get(symbol.name)
        if not isinstance(variable, Variable):
            raise self.syntax(ins, f"{symbol.name!r} is not declared")
        if variable.space == "shared":
            return self.shared_address(bits, variable.offset + symbol.offset)
        if variable.space in ("local", "param"):
            return self.constant(bits, (variable.offset + symbol.offset) & ((1 << bits) - 1))
        key = (id(variable), symbol.offset, bits)
        row = self.address_rows.get(key)
        if row is None:
            row = self.address_rows[key] = self.new_row(bits)
            self.program.addresses.append((variable, symbol.offset, bits, row))
        return row

    # --- operands

    def src(self, ins: Instruction, operand: Operand, type_name: str, *, loose: bool = False) -> int:
        """The row that holds an operand read at a type. `loose` lets a register be wider or narrower."""
        bits = WIDTHS[type_name]
        bits = 16 if bits == 8 else bits
        if isinstance(operand, Reg):
            if operand.reg.bits != bits and not loose:
                raise self.syntax(ins, f"register {operand.reg.name} (.{operand.reg.type}) is no .{type_name}")
            return self.row_of(operand.reg)
        if isinstance(operand, Imm):
            if bits == 1:
                return self.constant(1, int(operand.value != 0))
            return self.constant(bits, immediate_bits(operand, type_name if WIDTHS[type_name] > 8 else "b16"))
        if isinstance(operand, Special):
            return self.special(operand.name, bits)
        if isinstance(operand, Sym):
            return self.address_row(ins, operand, bits)
        if isinstance(operand, Neg):
            raise self.syntax(ins, "a negated register operand")
        raise self.syntax(ins, "an operand of the wrong kind")

    def dst(self, ins: Instruction, operand: Operand, type_name: str) -> int:
        bits = WIDTHS[type_name]
        bits = 16 if bits == 8 else bits
        if isinstance(operand, Sink):
            return self.new_row(bits)
        if not isinstance(operand, Reg):
            raise self.syntax(ins, "the destination is not a register")
        if operand.reg.bits != bits:
            raise self.syntax(ins, f"register {operand.reg.name} (.{operand.reg.type}) is no .{type_name}")
        return self.row_of(operand.reg)

    def vector(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Vec) else (operand,)

    def predicate(self, ins: Instruction, operand: Operand) -> tuple[int, bool]:
        """(row, negated) of a predicate source."""
        negated = False
        if isinstance(operand, Not):
            operand, negated = operand.item, True
        return self.src(ins, operand, "pred"), negated

    def address(self, ins: Instruction, operand: Operand) -> tuple[str, int, int]:
        """(key, row, offset): where an address is read from; see `address_of`."""
        if not isinstance(operand, Addr):
            raise self.syntax(ins, "expected an address in brackets")
        base = operand.base
        if base is None:
            return "u64", self.constant(64, operand.offset), 0
        if isinstance(base, Reg):
            if base.reg.bits not in (32, 64):
                raise self.syntax(ins, "an address register must have 32 or 64 bits")
            return f"u{base.reg.bits}", self.row_of(base.reg), operand.offset
        if isinstance(base, Sym):
            return "u64", self.address_row(ins, Sym(base.name, base.variable, operand.offset), 64), 0
        raise self.syntax(ins, "expected a register or a variable in the address")

    # --- decoding

    def reachable(self) -> list[Function]:
        """The kernel's callees, deepest first, then the kernel. Recursion can't be laid out statically."""
        order: list[Function] = []
        state: dict[str, int] = {}

        def visit(function: Function) -> None:
            state[function.name] = 1
            for ins in function.body or ():
                if ins.op != "call":
                    continue
                target = call_target(ins)
                callee = self.module.functions.get(target.name) if target else None
                if callee is None or callee.body is None:
                    continue  # decoding the call says so
                if state.get(callee.name) == 1:
                    raise self.unsupported(ins, "recursion")
                if callee.name not in state:
                    visit(callee)
            state[function.name] = 2
            order.append(function)

        visit(self.program.kernel)
        return order

    def decode(self) -> Program:
        program = self.program
        functions = self.reachable()
        shared: list[Variable] = []
        # a kernel's parameters lie at the start of every thread's local memory, so that they have addresses
        local = program.param_bytes = layout(self.program.kernel.params, 0)
        local = -(-local // 16) * 16
        for function in functions:
            mine = [v for v in function.variables if v.space in ("local", "param")]
            if not function.entry:
                mine += function.params + function.returns
            for parameter in mine:
                if parameter.space == "reg":
                    raise LaunchError(f"function {function.name}: register parameters are not supported")
            local = layout(mine, local)
            shared += [v for v in function.variables if v.space == "shared"]
            for variable in function.variables:
                self.variables.setdefault(variable.name, variable)
        shared += [v for v in self.module.variables if v.space == "shared"]
        end = layout([v for v in shared if not v.extern], 0)
        dynamic = [v for v in shared if v.extern]
        for variable in dynamic:
            program.shared_align = max(program.shared_align, variable.align)
        end = -(-end // program.shared_align) * program.shared_align if dynamic else end
        for variable in dynamic:
            variable.offset = end
        program.shared_bytes = end
        program.local_bytes = -(-local // 16) * 16
        program.cell = self.smallest_shared_access(functions)
        program.asynchronous = any(is_asynchronous(ins) for f in functions for ins in f.body or ())
        program.matrix_registers = matrix_registers(functions)
        at = 0
        for function in functions:
            self.starts[function.name] = at
            at += len(function.body or ()) + 1
        for function in functions:
            self.function = function
            self.start = self.starts[function.name]
            if not function.entry:
                self.returns[function.name] = self.new_row(32)
            for ins in function.body or ():
                self.one(ins)
            # a body may end without `ret`
            self.one(Instruction("ret", (), [], None, False, self.end_line(function), None))
        program.entry_pc = self.starts[program.kernel.name]
        upcoming = len(program.code)
        table = [0] * upcoming
        for pc in range(len(program.code) - 1, -1, -1):
            if program.terminators[pc] is not None:
                upcoming = pc
            table[pc] = upcoming
        program.next_terminator = table
        program.counts = dict(self.counts)
        return program

    def end_line(self, function: Function) -> int:
        return function.body[-1].line if function.body else function.line

    def smallest_shared_access(self, functions: list[Function]) -> int:
        smallest = 4
        for function in functions:
            for ins in function.body or ():
                if ins.op in ("ld", "st", "atom", "red", "ldu") and not {"param", "global", "const", "local"} & {
                    m.split("::")[0] for m in ins.mods
                }:
                    widths = [WIDTHS[m] // 8 for m in ins.mods if m in WIDTHS and m != "pred"]
                    smallest = min([smallest, *widths])
        return smallest

    def one(self, ins: Instruction) -> None:
        builder = OPS.get(ins.op)
        if builder is None:
            raise self.unsupported(ins)
        try:
            run = builder(self, ins)
        except (IndexError, KeyError, ValueError, StopIteration, AttributeError) as error:
            if isinstance(error, LaunchError):
                raise
            raise self.unsupported(ins, f"its modifiers or operands ({error})") from error
        program = self.program
        pc = len(program.code)
        if isinstance(run, Terminator):
            program.terminators.append(run)
            program.code.append(None)  # type: ignore[arg-type]
        else:
            if program.matrix_registers and ins.op != "wgmma":
                run = watched(run, ins, program.matrix_registers)
            if ins.guard is not None:
                run = guarded(run, self.row_of(ins.guard), ins.guard_negated, pc)
            program.terminators.append(None)
            program.code.append(run)
        program.instructions.append(ins)


def call_target(ins: Instruction) -> Sym | None:
    for operand in ins.operands:
        if isinstance(operand, Sym):
            return operand
    return None


def guarded(run: Run, row: int, negated: bool, pc: int) -> Run:
    """Execute only for the active threads whose predicate holds."""

    def guard(b: Any) -> None:
        mask = b.rows["pred"][row]
        sel = b.sel
        if sel is not None:
            mask = mask[sel]
        if negated:
            mask = ~mask
        count = int(np.count_nonzero(mask))
        b.predicated[pc] = b.predicated.get(pc, 0) + count
        if count == mask.size:
            run(b)
        elif count:
            b.sel = np.flatnonzero(mask) if sel is None else sel[mask]
            try:
                run(b)
            finally:
                b.sel = sel

    return guard


def elementwise(
    destination: tuple[str, int], sources: list[tuple[str, int]], compute: Callable[..., Any], *, out: bool = False
) -> Run:
    """The callable of an instruction that works on each thread alone.

    `compute` takes one array per source. `out=True` promises that it takes `out=` as a NumPy ufunc does.
    """
    dkey, drow = destination
    if len(sources) == 1:
        ((k1, r1),) = sources

        def run1(b: Any) -> None:
            rows, sel = b.rows, b.sel
            if sel is None:
                if out:
                    compute(rows[k1][r1], out=rows[dkey][drow])
                else:
                    rows[dkey][drow][...] = compute(rows[k1][r1])
            else:
                rows[dkey][drow][sel] = compute(rows[k1][r1][sel])

        return run1
    if len(sources) == 2:
        (k1, r1), (k2, r2) = sources

        def run2(b: Any) -> None:
            rows, sel = b.rows, b.sel
            if sel is None:
                if out:
                    compute(rows[k1][r1], rows[k2][r2], out=rows[dkey][drow])
                else:
                    rows[dkey][drow][...] = compute(rows[k1][r1], rows[k2][r2])
            else:
                rows[dkey][drow][sel] = compute(rows[k1][r1][sel], rows[k2][r2][sel])

        return run2

    def run_many(b: Any) -> None:
        rows, sel = b.rows, b.sel
        if sel is None:
            rows[dkey][drow][...] = compute(*[rows[k][r] for k, r in sources])
        else:
            rows[dkey][drow][sel] = compute(*[rows[k][r][sel] for k, r in sources])

    return run_many


def simple(
    d: Decoder,
    ins: Instruction,
    types: list[str],
    compute: Callable[..., Any],
    *,
    out: bool = False,
) -> Run:
    """`elementwise` for an instruction with operands d, a, b, …, of the given types, the destination's first."""
    if len(ins.operands) != len(types):
        raise d.syntax(ins, f"expected {len(types)} operands, found {len(ins.operands)}")
    destination = (KEYS[types[0]], d.dst(ins, ins.operands[0], types[0]))
    sources = [(KEYS[t], d.src(ins, o, t)) for t, o in zip(types[1:], ins.operands[1:], strict=True)]
    return elementwise(destination, sources, compute, out=out)


_PROGRAMS: dict[tuple[str, str], Program] = {}


def compile_program(text: str, kernel: str | None = None) -> Program:
    """The program of one kernel of a PTX text; results are cached by text and name."""
    key = (text, kernel or "")
    found = _PROGRAMS.get(key)
    if found is not None:
        return found
    # registers and variables get their places while a kernel is decoded, so each kernel is parsed afresh
    module = parse(text)
    entries = [f for f in module.functions.values() if f.entry and f.body is not None]
    if kernel is None:
        if len(entries) != 1:
            raise LaunchError(f"name the kernel: the text has {sorted(f.name for f in entries)}")
        chosen = entries[0]
    else:
        named = [f for f in entries if f.name == kernel]
        if not named:
            raise LaunchError(f"no kernel {kernel!r}; the text has {sorted(f.name for f in entries)}")
        chosen = named[0]
    program = Decoder(module, chosen).decode()
    if len(_PROGRAMS) >= 64:
        _PROGRAMS.pop(next(iter(_PROGRAMS)))
    _PROGRAMS[key] = program
    return program
