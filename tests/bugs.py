"""Deliberate bugs, derived from the syntax tree of a file: `bugs_of(path)`.

Each is a careless change at one place: two arguments swapped, a check dropped, off by
one. Bugs are changes of the text, whose other parts stay as they are. Left out is what
no test should look at: types, docstrings, texts of errors, what is only printed.
"""

import ast
import bisect
import itertools
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ROOTS = ("decentjax", "train")

OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OTHER |= {"in": "not in", "not in": "in", "is": "is not", "is not": "is"}
OTHER |= {"and": "or", "or": "and", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*"}
OTHER |= {"%": "//", "**": "*", "&": "|", "|": "&", "<<": ">>", ">>": "<<"}
OPERATOR = re.compile("|".join(map(re.escape, sorted(OTHER, key=len, reverse=True))))
PAIRS = "all any, min max, floor ceil, argmin argmax, minimum maximum, sum mean"
PAIRS += ", psum pmean, zeros_like ones_like, bisect_left bisect_right, pop popleft"
NAMES = {
    a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])
}
SAYS = {"print", "warn", "info", "warning", "debug", "log", "annotate_function"}
PLAIN = {"len", "int", "str", "list", "tuple", "dict", "set", "range", "isinstance"}
PLAIN |= {"super", "type", "getattr", "open", "cast", "iter", "float", "bool"}
PLAIN |= {"map", "filter", "partial", "field", "zip"}
METHODS = {"astype", "copy", "_replace", "transpose", "reshape", "ravel"}
METHODS |= {"mean", "sum", "max", "min", "set", "add", "strip", "lower", "removesuffix"}
SYMMETRIC = {"max", "min", "maximum", "minimum", "gcd", "lcm", "add", "equal"}
UNSEEN = {"strict", "encoding", "daemon", "help", "description", "stacklevel", "prefix"}
ORDERS = ast.Lt | ast.LtE | ast.Gt | ast.GtE
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

Change = tuple[str, int, int, str]  # Its kind; from where to where; what is there then.


class Bug(NamedTuple):
    """A change of a file.

    Args:
      path: of the file.
      line: where it begins.
      function: qualified name of that in which it is, empty at the top of the file.
      kind: what a careless hand did.
      begin: of the bytes that it changes.
      end: of the bytes that it changes.
      old: what stands there.
      new: what stands there instead.
      tests: that notice it, as arguments of pytest; empty if they are to be found.
    """

    path: str
    line: int
    function: str
    kind: str
    begin: int
    end: int
    old: str
    new: str
    tests: str = ""

    def __str__(self) -> str:
        old, new = (" ".join(x.split())[:60] for x in (self.old, self.new))
        place = f"{self.path}:{self.line} {self.function}".strip()
        return f"{place} {self.kind}: {old} => {new}"

    def changed(self, text: bytes) -> bytes:
        return text[: self.begin] + self.new.encode() + text[self.end :]


class Source:
    """The text of a file, by nodes of its syntax tree."""

    def __init__(self, text: bytes):
        self.text = text
        self.tree = ast.parse(text)

    @cached_property
    def _lines(self) -> list[int]:
        return [0, *(found.end() for found in re.finditer(rb"\n", self.text))]

    def span(self, node: ast.AST) -> tuple[int, int]:
        begin = self._lines[node.lineno - 1] + node.col_offset
        return begin, self._lines[node.end_lineno - 1] + node.end_col_offset

    def line(self, place: int) -> int:
        return bisect.bisect_right(self._lines, place)

    def of(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.text[begin:end].decode()

    def alone(self, node: ast.AST) -> str:
        """Returns it as it may stand anywhere."""
        atoms = ast.Name | ast.Constant | ast.Attribute | ast.Call | ast.Subscript
        return self.of(node) if isinstance(node, atoms) else f"({self.of(node)})"

    def instead(self, kind: str, node: ast.AST, new: str) -> Change:
        return kind, *self.span(node), new

    def between(self, kind: str, left: ast.AST, right: ast.AST) -> list[Change]:
        """Changes the operator between two operands, if it has another."""
        begin, end = self.span(left)[1], self.span(right)[0]
        found = OPERATOR.search(self.text[begin:end].decode())
        if found is None:
            return []
        begin, end = begin + found.start(), begin + found.end()
        return [(kind, begin, end, OTHER[found[0]])]

    def swapped(self, kind: str, left: ast.AST, right: ast.AST) -> Change:
        (begin, middle), (go_on, end) = self.span(left), self.span(right)
        between = self.text[middle:go_on].decode()
        return kind, begin, end, self.of(right) + between + self.of(left)

    def without(self, kind: str, first: ast.AST, last: ast.AST) -> Change:
        """Drops one of several that commas part."""
        begin, end = self.span(first)[0], self.span(last)[1]
        comma = re.compile(rb"\s*,\s*").match(self.text, end)
        return kind, begin, comma.end() if comma else end, ""


def bugs_of(path: str, text: bytes | None = None) -> list[Bug]:
    """Returns all bugs of a file, of which each can be parsed."""
    source = Source((ROOT / path).read_bytes() if text is None else text)
    found = {}
    for function, node in _nodes(source.tree, ""):
        for kind, begin, end, new in _changes(node, function, source):
            old, line = source.text[begin:end].decode(), source.line(begin)
            bug = Bug(path, line, function, kind, begin, end, old, new)
            found.setdefault((begin, end, new), bug)
    return list(found.values())


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    yield function, node
    if isinstance(node, DEFINITIONS):
        function = f"{function}.{node.name}".lstrip(".")
    inside = function + ".<locals>" * (not isinstance(node, ast.ClassDef | ast.Module))
    for child in _children(node):
        is_named = isinstance(child, DEFINITIONS)
        yield from _nodes(child, inside if function and is_named else function)


def _children(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return []
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            return [*defaults, *node.body]
        case ast.ClassDef():
            return node.body
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case ast.Assign([ast.Name(name)]) if re.match("_?[A-Z][a-z]", name):
            return []  # A type.
        case ast.Assert():
            return [node.test]
        case ast.Raise(ast.Call(ast.Name("SystemExit"), [code])):
            return [code]
        case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return []
        case ast.Call() if _name(node.func) in SAYS:
            return []
        case ast.keyword(arg) if arg in UNSEEN:
            return []
        case ast.If(test=ast.Name("TYPE_CHECKING")):
            return []
    return list(ast.iter_child_nodes(node))


def _changes(node: ast.AST, function: str, source: Source) -> Iterator[Change]:
    yield from _of_conditions(node, source)
    yield from _of_numbers(node, source)
    if isinstance(node, ast.Call) and _name(node.func) not in SAYS:
        yield from _of_calls(node, source)
    yield from _of_statements(node, function, source)
    yield from _of_parts(node, source)


def _of_conditions(node: ast.AST, source: Source) -> Iterator[Change]:
    match node:
        case ast.Compare():
            sides = [node.left, *node.comparators]
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
                kind = "boundary" if isinstance(op, ORDERS) else "opposite"
                yield from source.between(kind, left, right)
        case ast.BoolOp():
            for left, right in itertools.pairwise(node.values):
                yield from source.between("and for or", left, right)
            for value in node.values:
                neutral = str(isinstance(node.op, ast.And))
                yield source.instead("condition dropped", value, neutral)
        case ast.UnaryOp(op=ast.Not()):
            yield source.instead("not dropped", node, source.alone(node.operand))
        case ast.comprehension():
            for test in node.ifs:
                yield source.instead("filter dropped", test, "True")
        case ast.If() | ast.While() | ast.IfExp() if not _has_opposite(node.test):
            yield source.instead("negated", node.test, f"not {source.alone(node.test)}")
    if isinstance(node, ast.If):
        kind = "check dropped" if isinstance(node.body[-1], ast.Raise) else "never"
        yield source.instead(kind, node.test, "False")
        if kind == "never":
            yield source.instead("always", node.test, "True")


def _has_opposite(test: ast.AST) -> bool:
    """Whether other bugs negate it: that of its one comparison, or of its `not`."""
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and not isinstance(test.ops[0], ORDERS)
    return isinstance(test, ast.UnaryOp)


def _of_numbers(node: ast.AST, source: Source) -> Iterator[Change]:
    match node:
        case ast.BinOp(left, op, right) if not {_kind(left), _kind(right)} & {str}:
            yield from source.between("operator", left, right)
            yield source.instead("operand dropped", node, source.alone(left))
            if isinstance(op, ast.Sub | ast.Div | ast.MatMult | ast.Mod):
                yield source.swapped("operands swapped", left, right)
            if isinstance(op, ast.Add | ast.Mult | ast.Sub | ast.MatMult):
                yield source.instead("operand dropped", node, source.alone(right))
        case ast.AugAssign():
            yield from source.between("operator", node.target, node.value)
        case ast.UnaryOp(op=ast.USub()):
            yield source.instead("sign dropped", node, source.alone(node.operand))
        case ast.Constant(bool() as value):
            yield source.instead("constant", node, str(not value))
        case ast.Constant(int() as value) if value < 10:
            yield source.instead("off by one", node, str(value + 1))
            if value > 0:
                yield source.instead("off by one", node, str(value - 1))
        case ast.Constant(float() as value) if 0.01 < value < 10 or value == 0:
            yield source.instead("constant", node, str(2 * value or 1.0))


def _kind(node: ast.AST) -> type | None:
    """Returns str for what is a text, as far as one can see."""
    if isinstance(node, ast.Constant):
        return type(node.value)
    return str if isinstance(node, ast.JoinedStr) else None


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _of_calls(node: ast.Call, source: Source) -> Iterator[Change]:
    name = _name(node.func)
    for keyword in node.keywords:
        if keyword.arg not in UNSEEN:
            yield source.without("argument dropped", keyword, keyword)
    if name in NAMES:
        new = source.of(node.func)[: -len(name)] + NAMES[name]
        yield source.instead("another function", node.func, new)
    if name not in PLAIN and not name[:1].isupper():
        yield from _of_arguments(node, source)
    if isinstance(node.func, ast.Attribute) and name in METHODS:
        yield source.instead("call dropped", node, source.alone(node.func.value))


def _of_arguments(node: ast.Call, source: Source) -> Iterator[Change]:
    name, odd = _name(node.func), ast.Starred | ast.Lambda
    for a, b in itertools.pairwise(node.args):
        if not isinstance(a, odd) and not isinstance(b, odd) and name not in SYMMETRIC:
            yield source.swapped("arguments swapped", a, b)
    if len(node.args) > 1:
        yield source.without("argument dropped", node.args[-1], node.args[-1])
    for arg in node.args[:2]:
        if not isinstance(arg, odd | ast.Constant):
            yield source.instead("call dropped", node, source.alone(arg))


def _of_statements(node: ast.AST, function: str, source: Source) -> Iterator[Change]:
    match node:
        case ast.Expr(ast.Call(func) | ast.Await(ast.Call(func))):
            if _name(func) not in SAYS:
                yield source.instead("statement dropped", node, "pass")
        case ast.AugAssign() | ast.Delete():
            yield source.instead("statement dropped", node, "pass")
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            if not function.endswith("__init__"):
                yield source.instead("statement dropped", node, "pass")
        case ast.Assign([ast.Name(name)], value):
            if any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(value)):
                yield source.instead("statement dropped", node, "pass")
        case ast.ExceptHandler(type=ast.AST() as kind, body=[*_, last]):
            yield source.instead("error not caught", kind, "()")
            if isinstance(last, ast.Raise):
                yield source.instead("error dropped", last, "pass")


def _of_parts(node: ast.AST, source: Source) -> Iterator[Change]:
    match node:
        case ast.IfExp():
            yield source.instead("always", node, source.alone(node.body))
            yield source.instead("never", node, source.alone(node.orelse))
        case ast.Subscript(slice=ast.Slice()):
            yield source.instead("slice dropped", node, source.alone(node.value))
        case ast.Tuple(elts) | ast.List(elts) | ast.Set(elts) if len(elts) > 1:
            yield from _of_elements(node, elts, source)
        case ast.Dict():
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None:
                    yield source.without("element dropped", key, value)


def _of_elements(
    node: ast.AST, elements: list[ast.expr], source: Source
) -> Iterator[Change]:
    is_tuple = isinstance(node, ast.Tuple)
    if not isinstance(node, ast.Set) and len(elements) < 5:
        for a, b in itertools.pairwise(elements):
            if {_kind(a), _kind(b)} != {str}:  # Most are sets of names.
                yield source.swapped("elements swapped", a, b)
    for element in elements:
        is_dropped = _kind(element) is str or isinstance(element, ast.Starred)
        if (len(elements) > 2 and is_dropped) or not is_tuple:
            yield source.without("element dropped", element, element)
