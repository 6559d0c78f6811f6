"""What the parser makes of a PTX text: functions, variables, registers and instructions, names resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

WIDTHS = {
    "pred": 1,
    "b8": 8, "u8": 8, "s8": 8,
    "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32,
    "u16x2": 32, "s16x2": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64,
    "b128": 128,
}  # fmt: skip


@dataclass(eq=False)
class Register:
    """One virtual register: `bits` is its storage class (1, 16, 32 or 64), `row` its place there."""

    name: str
    type: str
    bits: int
    row: int = -1


@dataclass(eq=False)
class Variable:
    """A variable in a state space; `offset` is filled in by layout (bytes from the space's base)."""

    name: str
    space: str
    type: str
    align: int
    size: int
    extern: bool = False
    initial: bytes | None = None
    pointers: list[tuple[int, str, int]] = field(default_factory=list)
    offset: int = -1
    line: int = 0


@dataclass(frozen=True)
class Reg:
    reg: Register


@dataclass(frozen=True)
class Imm:
    """An immediate; `kind` is "int", "f32" (raw bits), "f64" (raw bits) or "float" (a decimal)."""

    value: int | float
    kind: str


@dataclass(frozen=True)
class Sym:
    """The address of a variable, or a function's or label's name."""

    name: str
    variable: Variable | None
    offset: int = 0


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Vec:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Addr:
    base: Operand | None
    offset: int
    more: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    item: Operand


@dataclass(frozen=True)
class Neg:
    item: Operand


@dataclass(frozen=True)
class Sink:
    pass


@dataclass(frozen=True)
class Group:
    """A parenthesised list, as in `call (r), f, (a, b)`."""

    items: tuple[Operand, ...]


Operand = Union[Reg, Imm, Sym, Special, Vec, Addr, Pair, Not, Neg, Sink, Group]  # noqa: UP007 (forward references)


@dataclass(eq=False)
class Instruction:
    op: str
    mods: tuple[str, ...]
    operands: list[Operand]
    guard: Register | None
    guard_negated: bool
    line: int
    scope: Scope | None = None

    @property
    def name(self) -> str:
        return ".".join((self.op, *self.mods))


class Scope:
    """A `{ }` block: the names declared in it, and where it lies."""

    def __init__(self, parent: Scope | None) -> None:
        self.parent = parent
        self.names: dict[str, Register | Variable] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}

    def find(self, name: str) -> Register | Variable | None:
        scope: Scope | None = self
        while scope is not None:
            hit = scope.names.get(name)
            if hit is not None:
                return hit
            scope = scope.parent
        return None

    def label(self, name: str) -> int | None:
        scope: Scope | None = self
        while scope is not None:
            hit = scope.labels.get(name)
            if hit is not None:
                return hit
            scope = scope.parent
        return None

    def table(self, name: str) -> list[str] | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.tables:
                return scope.tables[name]
            scope = scope.parent
        return None


@dataclass(eq=False)
class Function:
    name: str
    entry: bool
    params: list[Variable]
    returns: list[Variable]
    body: list[Instruction] | None
    variables: list[Variable]
    directives: dict[str, tuple[int, ...]]
    line: int


@dataclass(eq=False)
class Module:
    lines: list[str]
    version: str
    target: str
    functions: dict[str, Function]
    variables: list[Variable]
