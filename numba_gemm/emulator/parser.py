"""A PTX text to a `Module` (PTX ISA 9.0, chapters 4, 5 and 7)."""

from __future__ import annotations

from .errors import PtxSyntaxError
from .lexer import Token
from .literals import TokenStream, encode_immediate
from .module import (
    WIDTHS,
    Addr,
    Function,
    Group,
    Imm,
    Instruction,
    Module,
    Neg,
    Not,
    Operand,
    Pair,
    Reg,
    Register,
    Scope,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)

_SPACES = {".reg", ".local", ".shared", ".global", ".const", ".param", ".sreg", ".tex"}
_LINKING = {".visible", ".extern", ".weak", ".common"}
_SPECIALS = frozenset(
    ["%tid", "%ntid", "%laneid", "%warpid", "%nwarpid", "%ctaid", "%nctaid", "%smid", "%nsmid", "%gridid",
     "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid", "%cluster_ctarank", "%cluster_nctarank",
     "%is_explicit_cluster", "%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo",
     "%globaltimer_hi", "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt",
     "%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size", "%current_graph_exec",
     "%reserved_smem_offset_begin", "%reserved_smem_offset_end", "%reserved_smem_offset_cap"]
)  # fmt: skip


class Parser(TokenStream):
    """One pass over the tokens; names are resolved as they are met."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.scope = Scope(None)
        self.functions: dict[str, Function] = {}
        self.variables: list[Variable] = []
        self.version = ""
        self.target = ""
        self.locals: list[Variable] | None = None
        self.body: list[Instruction] = []

    # --- module scope

    def parse(self) -> Module:
        while self.tokens[self.at].kind != "end":
            text = self.peek()
            if text == ".version":
                self.next()
                self.version = self.next().text
            elif text == ".target":
                self.next()
                self.target = self.next().text
                while self.accept(","):
                    self.next()
            elif text == ".address_size":
                self.next()
                if self.next().text != "64":
                    raise self.error("only 64-bit addresses are supported")
            elif text in (".file", ".loc"):
                self.skip_line()
            elif text == ".section":
                self.next()
                self.next()
                self.skip_braces()
            elif text in (".pragma", ".alias", ".branchtargets"):
                while not self.accept(";"):
                    self.next()
            elif text in (";", "@@DWARF"):
                self.next()
            else:
                self.declaration()
        return Module(self.lines, self.version, self.target, self.functions, self.variables)

    def declaration(self) -> None:
        linking = set()
        while self.peek() in _LINKING:
            linking.add(self.next().text)
        text = self.peek()
        if text in (".entry", ".func"):
            self.function(self.next().text == ".entry")
        elif text in _SPACES:
            self.variable(".extern" in linking)
        else:
            raise self.error(f"unknown directive {text!r}")

    def function(self, entry: bool) -> None:
        line = self.tokens[self.at].line
        outer = self.scope
        self.scope = Scope(outer)
        self.locals = []
        returns = self.parameters() if not entry and self.peek() == "(" else []
        name = self.next().text
        params = self.parameters() if self.peek() == "(" else []
        directives: dict[str, tuple[int, ...]] = {}
        while self.peek() not in ("{", ";"):
            token = self.next()
            if not token.text.startswith("."):
                raise self.error(f"unexpected {token.text!r} before a function's body", token)
            values: list[int] = []
            while self.tokens[self.at].kind == "number" or self.peek() == ",":
                if not self.accept(","):
                    values.append(self.integer())
            directives[token.text] = tuple(values)
        body: list[Instruction] | None = None
        if self.accept(";"):
            pass
        else:
            self.body = body = []
            self.next()
            self.block()
        if body is not None or name not in self.functions:
            self.functions[name] = Function(name, entry, params, returns, body, self.locals, directives, line)
        self.scope = outer
        self.locals = None

    def parameters(self) -> list[Variable]:
        self.expect("(")
        found: list[Variable] = []
        while not self.accept(")"):
            if self.accept(","):
                continue
            if self.peek() in (".param", ".reg"):
                space = self.next().text[1:]
                found.extend(self.variable_tail(space, False))
            else:
                raise self.error("expected a parameter")
        return found

    # --- variables

    def variable(self, extern: bool) -> None:
        space = self.next().text[1:]
        for variable in self.variable_tail(space, extern):
            (self.variables if self.locals is None else self.locals).append(variable)
        self.expect(";")

    def variable_tail(self, space: str, extern: bool) -> list[Variable]:
        align = 0
        vector = 1
        type_name = ""
        while True:
            token = self.tokens[self.at]
            if token.text == ".align":
                self.next()
                align = self.integer()
            elif token.text == ".ptr":
                self.next()
                while self.peek() in (".global", ".shared", ".const", ".local", ".param"):
                    self.next()
            elif token.text in (".v2", ".v4", ".v8"):
                self.next()
                vector = int(token.text[2:])
            elif token.text in (".attribute", ".unified"):
                self.next()
                if self.peek() == "(":
                    while self.next().text != ")":
                        pass
            elif token.text.startswith(".") and token.text[1:] in WIDTHS:
                self.next()
                type_name = token.text[1:]
            elif token.text.startswith("."):
                raise self.error(f"unknown type or attribute {token.text!r}")
            else:
                break
        if not type_name:
            raise self.error("a variable without a type")
        found = []
        while True:
            token = self.next()
            if token.kind != "word":
                raise self.error(f"expected a name, found {token.text!r}", token)
            name = token.text
            if space == "reg":
                self.register(name, type_name, vector)
            else:
                found.append(self.memory_variable(name, space, type_name, align, vector, extern, token.line))
            # in a parameter list the comma separates parameters, not names
            if self.peek() != "," or self.tokens[self.at + 1].text.startswith("."):
                break
            self.next()
        return found

    def register(self, name: str, type_name: str, vector: int) -> None:
        bits = WIDTHS[type_name]
        bits = 16 if bits == 8 else bits
        if vector != 1 or bits == 128:
            raise self.error("vector and 128-bit registers are not supported")
        if self.accept("<"):
            count = self.integer()
            self.expect(">")
            for index in range(count):
                full = f"{name}{index}"
                self.scope.names[full] = Register(full, type_name, bits)
        else:
            self.scope.names[name] = Register(name, type_name, bits)

    def memory_variable(
        self, name: str, space: str, type_name: str, align: int, vector: int, extern: bool, line: int
    ) -> Variable:
        element = WIDTHS[type_name] // 8 * vector
        count = 1
        unsized = False
        while self.accept("["):
            if self.peek() == "]":
                unsized = True
            else:
                count *= self.integer()
            self.expect("]")
        variable = Variable(name, space, type_name, align or element, 0, line=line)
        if self.accept("="):
            data, variable.pointers = self.initializer(type_name)
            if unsized:
                count = max(1, len(data) // element)
            variable.initial = data.ljust(element * count, b"\0")
            unsized = False
        variable.size = 0 if unsized else element * count
        variable.extern = extern or unsized
        self.scope.names[name] = variable
        return variable

    def initializer(self, type_name: str) -> tuple[bytes, list[tuple[int, str, int]]]:
        data = bytearray()
        pointers: list[tuple[int, str, int]] = []
        width = WIDTHS[type_name] // 8

        def value() -> None:
            if self.accept("{"):
                while not self.accept("}"):
                    value()
                    self.accept(",")
                return
            token = self.tokens[self.at]
            if token.kind == "word":
                self.next()
                name = token.text
                if name == "generic":
                    self.expect("(")
                    name = self.next().text
                    self.expect(")")
                offset = self.integer() if self.accept("+") else 0
                pointers.append((len(data), name, offset))
                data.extend(bytes(width))
                return
            data.extend(encode_immediate(self.constant(), type_name))

        value()
        return bytes(data), pointers

    # --- function bodies

    def block(self) -> None:
        depth = 1
        while depth:
            token = self.tokens[self.at]
            text = token.text
            if token.kind == "end":
                raise self.error("a function's body is not closed")
            if text == "{":
                self.next()
                self.scope = Scope(self.scope)
                depth += 1
            elif text == "}":
                self.next()
                depth -= 1
                if depth:
                    self.scope = self.scope.parent  # type: ignore[assignment]
            elif text == ";":
                self.next()
            elif text in (".loc", ".file"):
                self.skip_line()
            elif text == ".pragma":
                while not self.accept(";"):
                    self.next()
            elif text in _SPACES:
                self.variable(False)
            elif text == ".extern":
                self.next()
                self.variable(True)
            elif token.kind == "word" and self.tokens[self.at + 1].text == ":":
                self.label()
            elif (token.kind == "word" and not text.startswith(".")) or text == "@":
                self.instruction()
            else:
                raise self.error(f"unknown statement {text!r}")

    def label(self) -> None:
        name = self.next().text
        self.next()
        if self.peek() in (".branchtargets", ".calltargets"):
            self.next()
            names = []
            while not self.accept(";"):
                if not self.accept(","):
                    names.append(self.next().text)
            self.scope.tables[name] = names
        elif self.peek() == ".callprototype":
            while not self.accept(";"):
                self.next()
        else:
            self.scope.labels[name] = len(self.body)

    def instruction(self) -> None:
        guard = None
        negated = False
        if self.accept("@"):
            negated = self.accept("!")
            token = self.next()
            found = self.scope.find(token.text)
            if not isinstance(found, Register) or found.bits != 1:
                raise self.error(f"{token.text!r} is not a predicate register", token)
            guard = found
        token = self.next()
        if token.kind != "word":
            raise self.error(f"expected an instruction, found {token.text!r}", token)
        op, *mods = token.text.split(".")
        operands: list[Operand] = []
        if not self.accept(";"):
            operands.append(self.operand())
            while not self.accept(";"):
                self.expect(",")
                operands.append(self.operand())
        self.body.append(Instruction(op, tuple(mods), operands, guard, negated, token.line, self.scope))

    def operand(self) -> Operand:
        first = self.simple_operand()
        if self.accept("|"):
            return Pair(first, self.simple_operand())
        return first

    def simple_operand(self) -> Operand:
        token = self.tokens[self.at]
        text = token.text
        if text == "{":
            self.next()
            items: list[Operand] = []
            while not self.accept("}"):
                items.append(self.operand())
                self.accept(",")
            return Vec(tuple(items))
        if text == "[":
            self.next()
            return self.address()
        if text == "(":
            # a parenthesised list of a call, or a constant expression
            if self.tokens[self.at + 1].kind == "number" or self.tokens[self.at + 1].text in "-(~":
                save = self.at
                try:
                    return self.constant()
                except PtxSyntaxError:
                    self.at = save
            self.next()
            items = []
            while not self.accept(")"):
                items.append(self.operand())
                self.accept(",")
            return Group(tuple(items))
        if text == "!":
            self.next()
            return Not(self.simple_operand())
        if token.kind == "number" or text in ("-", "~"):
            if text == "-" and self.tokens[self.at + 1].kind == "word":
                self.next()
                return Neg(self.simple_operand())
            return self.constant()
        if text == "_":
            self.next()
            return Sink()
        if token.kind == "word":
            self.next()
            return self.name(token)
        raise self.error(f"unexpected {text!r} as an operand")

    def name(self, token: Token) -> Operand:
        text = token.text
        found = self.scope.find(text)
        if isinstance(found, Register):
            return Reg(found)
        if text.startswith("%"):
            stem = text.split(".")[0]
            if stem in _SPECIALS or stem.startswith(("%envreg", "%pm")):
                return Special(text)
            raise self.error(f"register {text!r} is not declared", token)
        offset = 0
        if self.peek() in ("+", "-") and self.tokens[self.at + 1].kind == "number":
            sign = -1 if self.next().text == "-" else 1
            offset = sign * self.integer()
        if text == "WARP_SZ":
            return Imm(32 + offset, "int")
        return Sym(text, found, offset)

    def address(self) -> Addr:
        base: Operand | None = None
        offset = 0
        more: list[Operand] = []
        token = self.tokens[self.at]
        if token.kind == "word":
            self.next()
            base = self.name(token)
            if isinstance(base, Sym):
                offset, base = base.offset, Sym(base.name, base.variable)
        elif token.kind == "number" or token.text == "-":
            offset = self.integer()
        else:
            raise self.error(f"unexpected {token.text!r} in an address")
        while not self.accept("]"):
            if self.accept("+"):
                offset += self.integer()
            elif self.accept("-"):
                offset -= self.integer()
            elif self.accept(","):
                more.append(self.operand())
            else:
                raise self.error(f"unexpected {self.peek()!r} in an address")
        return Addr(base, offset, tuple(more))


def parse(text: str) -> Module:
    """Parse a PTX text.

    Raises `PtxSyntaxError`, naming the line, where the text isn't PTX.
    """
    return Parser(text).parse()
