"""No test holds a result to a number that one machine gave.

A bound comes from the format (`finfo`, a power of two), from the rounding errors that a sum may
make in any order (`tests.helpers.roundoff`, `dot_bound`), from a noise floor that the test measures
(`rounding_bound`), from the tolerance table (`EXACT`), or from the statistics of a draw. A decimal
literal below `SMALL` in a comparison is none of these, nor is the default tolerance of NumPy's
`allclose`. Where a literal is right, a comment `# bound: why` stands in the same statement, or
right above it.

`approx` and `math.isclose` without a tolerance are allowed: they compare formulas in float64, whose
rounding is seven orders below what they let pass.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator

import pytest

from tests.helpers import ROOT

SMALL = 0.01
"""A literal bound below it is a rounding error or a share of one; shares of a draw are above."""
REASON = "# bound:"
ARRAYS = ("allclose", "assert_allclose", "assert_close")
"""Functions that compare arrays; without a tolerance they have one that fits no dtype."""
CALLS = (*ARRAYS, "approx", "isclose")
TOLERANCES = {"rtol", "atol", "rel", "abs", "rel_tol", "abs_tol"}
"""Keywords of all functions that compare, for what they let pass."""
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def literal_bounds(text: str) -> list[tuple[int, str]]:
    """Return line and source of each comparison with a literal bound that has no reason."""
    tree, reasons = ast.parse(text), _lines_with_reason(text)
    names, found = _literal_names(tree), set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and not reasons & _lines_of(statement):
            found |= {
                (node.lineno, ast.unparse(node))
                for part in _expressions(statement)
                for node in ast.walk(part)
                if _is_bounded_by_a_literal(node, names)
            }
    return sorted(found)


def _lines_with_reason(text: str) -> set[int]:
    if REASON not in text:
        return set()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (t for t in tokens if t.type == tokenize.COMMENT)
    return {t.start[0] for t in comments if t.string.startswith(REASON)}


def _lines_of(statement: ast.stmt) -> set[int]:
    """Return the lines of a statement, or of the head of one with a body, and the line above."""
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return set(range(statement.lineno - 1, end + 1))


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield what a statement computes, without the statements in its body."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child


def _literal_names(tree: ast.Module) -> set[str]:
    """Return the names that are set to small literals, in the module or in a function."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            names |= {t.id for t, v in pairs if isinstance(t, ast.Name) and _is_small(v, set())}
    return names


def _is_small(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is a small decimal literal, or such a literal times something."""
    match node:
        case ast.Constant(value=float(value)):
            return 0 < abs(value) < SMALL
        case ast.Name(id=name):
            return name in names
        case ast.UnaryOp(operand=operand):
            return _is_small(operand, names)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.Add() | ast.Sub(), right=right):
            return _is_small(left, names) or _is_small(right, names)
    return False


def _is_bounded_by_a_literal(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            ordered = any(isinstance(op, ORDER) for op in ops)
            return ordered and any(_is_small(side, names) for side in (left, *others))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in CALLS:
            given = [k.value for k in node.keywords if k.arg in TOLERANCES]
            return (name in ARRAYS and not given) or any(_is_small(v, names) for v in given)
    return False


FILES = sorted((ROOT / "tests").rglob("*.py"))


def test_no_test_has_a_literal_bound() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {source}"
        for path in FILES
        for line, source in literal_bounds(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(
        ["take the bound from the format, a noise floor or a derivation, or say why:", *found]
    )


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("assert error < 2e-7", True),
        ("BOUND = 2e-7\nassert error <= 4 * BOUND", True),
        ("def test():\n    bound, other = 1e-6, 0.0\n    assert not error > bound", True),
        ("assert all(1e-8 < x for x in errors)", True),
        ("assert np.allclose(a, b)", True),
        ("np.testing.assert_allclose(a, b, rtol=1e-5)", True),
        ("assert a == pytest.approx(b, rel=1e-6)", True),
        ("with held:\n    if error < 1e-6:\n        pass", True),
        ("assert error < np.finfo(np.float32).eps", False),
        ("assert error <= 2.0**-24 * size", False),
        ("assert np.allclose(a, b, rtol=0, atol=roundoff(8))", False),
        ("assert a == pytest.approx(b)", False),
        ("assert rate == 3e-4", False),
        ("assert share < 0.05", False),
        ("# bound: in units of the learning rate\nassert error < 3e-4", False),
        ("assert (\n    error < 3e-4  # bound: three additions\n)", False),
    ],
)
def test_the_scan_tells_a_literal_from_a_derivation(source: str, refused: bool) -> None:
    assert bool(literal_bounds(source)) == refused
