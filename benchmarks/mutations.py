"""The mutants of a module, each with one changed operator, number or condition.

Left out, because they are no formulas: texts, errors, annotations and decorators. Also the defaults
of options, which `tests/test_docs_site.py` compares with the tables of the pages (those of `sft`
and of methods of gradients are in `tests/plugins/gradients/test_sft.py`).
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

_OTHER: Mapping[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    **{ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.USub: ast.UAdd},
}
_OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor"}
_TESTED = ast.Compare | ast.BoolOp | ast.UnaryOp
"""Conditions that have mutants."""
_SKIPPED = ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert
_SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")
_SKIPPED_CALLS = ("say", "print", "say_once", "done_saying", "parts", "chz.field", "TypeVar")


@dataclass(frozen=True)
class Mutant:
    """A change of a module.

    Attributes:
        lines: lines of the statement, or of the expression in one that contains statements.
        functions: outermost functions, as they are and as mutants; empty if anything else differs.
        module: all of it.
    """

    path: str
    lines: range
    change: str
    functions: Mapping[CodeType, CodeType]
    module: CodeType


def mutants(path: str, source: str) -> Iterator[Mutant]:
    tree = ast.parse(source)
    before = compile(tree, path, "exec")
    for node, shown, statement in list(_sites(tree, tree, tree)):
        for field, value in _changes(node):
            old, was = getattr(node, field), ast.unparse(shown)
            setattr(node, field, value)
            after = compile(ast.fix_missing_locations(tree), path, "exec")
            change = f"{shown.lineno}: {_short(was)} -> {_short(ast.unparse(shown))}"
            setattr(node, field, old)
            whole = shown if hasattr(statement, "body") else statement
            functions = _changed_functions(before, after) or {}
            lines = range(whole.lineno, whole.end_lineno + 1)
            yield Mutant(path, lines, change, functions, after)


def _short(text: str) -> str:
    return " ".join(text.split())[:90]


def _changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield fields of a node, each with another value."""
    match node:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() | ast.UnaryOp() if (
            type(node.op) in _OTHER
        ):
            yield "op", _OTHER[type(node.op)]()
        case ast.UnaryOp(op=ast.Not()):
            yield "operand", _negated(node.operand)
        case ast.Compare():
            for i, op in enumerate(node.ops):
                yield "ops", [*node.ops[:i], _OTHER[type(op)](), *node.ops[i + 1 :]]
        case ast.Constant(value=bool()):
            yield "value", not node.value
        case ast.Constant(value=int() as value):
            yield "value", value + 1
        case ast.Constant(value=float() as value):
            yield "value", value / 2 or 1.0
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, _TESTED):
                yield "test", _negated(test)
        case ast.comprehension(ifs=ifs):
            for i, test in enumerate(ifs):
                if not isinstance(test, _TESTED):
                    yield "ifs", [*ifs[:i], _negated(test), *ifs[i + 1 :]]
        case ast.Name(id=name) if name in _OTHER_NAMES:
            yield "id", _OTHER_NAMES[name]
        case ast.Attribute(attr=name) if name in _OTHER_NAMES:
            yield "attr", _OTHER_NAMES[name]
        case ast.Expr(value=ast.Call() as call) if ast.unparse(call.func) not in _SKIPPED_CALLS:
            yield "value", ast.Constant(None)


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _sites(node: ast.AST, shown: ast.AST, statement: ast.AST) -> Iterator[tuple[ast.AST, Any, Any]]:
    """Yield this node and those below, each with the nearest that has a line and its statement."""
    if isinstance(node, _SKIPPED):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _SKIPPED_CALLS:
        return
    if isinstance(node, ast.keyword) and node.arg in ("strict", "doc", "kw_only", "compare"):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    shown = node if isinstance(node, ast.expr | ast.stmt) else shown
    statement = node if isinstance(node, ast.stmt) else statement
    yield node, shown, statement
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in _SKIPPED_FIELDS:
                yield from _sites(child, shown, statement)


def _changed_functions(before: CodeType, after: CodeType) -> dict[CodeType, CodeType] | None:
    """Return outermost functions that differ; None if anything outside of functions does."""
    found: dict[CodeType, CodeType] = {}
    if (before.co_code, before.co_names) != (after.co_code, after.co_names):
        return None
    if len(before.co_consts) != len(after.co_consts):
        return None
    for old, new in zip(before.co_consts, after.co_consts, strict=True):
        if old == new and type(old) is type(new):
            continue
        if not isinstance(old, CodeType) or old.co_name[1:].endswith(("comp>", "expr>")):
            return None
        is_function = old.co_flags & inspect.CO_OPTIMIZED  # And no body of a class.
        inner = {old: new} if is_function else _changed_functions(old, new)
        if inner is None:
            return None
        found |= inner
    return found
