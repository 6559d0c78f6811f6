"""Loop unrolling in the source, before Numba sees it.

Numba has no unroll pragma, and NVVM unrolls a nest of constant loops only while the result stays small. Where it
stops, a register array is indexed by a variable and falls into local memory, or the loads of one step no longer
overlap the FMAs of the one before. A kernel says where it wants a loop unrolled whatever its size::

    for k in unroll(BK):
        ...

and :func:`expand_unrolled` rewrites that loop into BK copies of its body with ``k`` replaced by 0, 1, 2, …
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def unroll(*bounds: int) -> range:
    """``range(*bounds)``, and a mark: the loop over it is unrolled in the source when the kernel is compiled.

    The bounds must be known when the kernel is built: constants, names of its module, or closure variables.
    """
    return range(*bounds)


def expand_unrolled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with every ``for … in unroll(…)`` written out; itself if it has none.

    Raises
    ------
    ValueError : if an unrolled loop has bounds that aren't known, a ``break`` or ``continue`` of its own, or a target
        that its body assigns to.
    """
    if "unroll" not in function.__code__.co_names + function.__code__.co_freevars:
        return function
    source, first_line = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(source)))
    ast.increment_lineno(tree, first_line - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []

    closure = inspect.getclosurevars(function)
    names = {**closure.globals, **closure.nonlocals}
    definition.body = _Unroller(names).expand_all(definition.body)

    # Closure variables become the parameters of a factory, so that the rewritten function closes over them again.
    factory = ast.FunctionDef(
        name="factory",
        args=ast.arguments(
            posonlyargs=[],
            args=[ast.arg(name) for name in function.__code__.co_freevars],
            kwonlyargs=[],
            kw_defaults=[],
            defaults=[],
        ),
        body=[definition, ast.Return(ast.Name(definition.name, ast.Load()))],
        decorator_list=[],
    )
    if hasattr(ast, "TypeAlias"):  # Python 3.12 added the field
        setattr(factory, "type_params", [])  # noqa: B010 - older stubs don't know it
    module = ast.fix_missing_locations(ast.Module([factory], []))
    namespace: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, namespace)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    expanded: Callable[..., Any] = namespace["factory"](*cells)
    return expanded


class _Unroller(ast.NodeTransformer):
    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def expand_all(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        expanded: list[ast.stmt] = []
        for statement in statements:
            result = self.visit(statement)
            expanded.extend(result if isinstance(result, list) else [result])
        return expanded

    def visit_For(self, loop: ast.For) -> Any:
        if not (
            isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "unroll"
        ):
            loop.body = self.expand_all(loop.body)
            return loop
        if not isinstance(loop.target, ast.Name) or loop.orelse:
            raise ValueError(f"line {loop.lineno}: unroll needs a plain loop variable and no else")
        target = loop.target.id
        for node in ast.walk(ast.Module(loop.body, [])):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == target:
                raise ValueError(f"line {node.lineno}: the body of an unrolled loop assigns to {target!r}")
        _refuse_jumps(loop.body)
        bounds = [self._value(argument) for argument in loop.iter.args]
        copies: list[ast.stmt] = []
        for value in unroll(*bounds):
            body = [_Substitute(target, value).visit(copy.deepcopy(statement)) for statement in loop.body]
            copies.extend(_Unroller({**self.names, target: value}).expand_all(body))
        return copies

    def _value(self, expression: ast.expr) -> int:
        code = compile(ast.Expression(expression), "<unroll>", "eval")
        try:
            value = eval(code, {"__builtins__": {}}, self.names)
        except NameError as error:
            raise ValueError(
                f"line {expression.lineno}: the bounds of unroll must be known when the kernel is built ({error})"
            ) from None
        return int(value)


def _refuse_jumps(statements: list[ast.stmt]) -> None:
    """A break or continue of the unrolled loop itself would lose its loop; those of inner loops are fine."""
    for statement in statements:
        if isinstance(statement, ast.Break | ast.Continue):
            raise ValueError(f"line {statement.lineno}: an unrolled loop can't have break or continue")
        if isinstance(statement, ast.If):
            _refuse_jumps(statement.body)
            _refuse_jumps(statement.orelse)


class _Substitute(ast.NodeTransformer):
    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == self.name and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(self.value), node)
        return node
