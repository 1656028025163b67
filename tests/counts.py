"""Counts what the design wants few of: `python tests/counts.py`.

Lines are lines of code, without docstrings, comments and blank ones.
"""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = "decentjax", "train", "benches", "tests", "configs", "examples"
PROGRAM = ROOMS[:3]
LONG_FILE, LONG_FUNCTION, WIDE_SIGNATURE = 500, 60, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef
NAMES = ast.Name | ast.Attribute
KINDS = NAMES | ast.Subscript | ast.BinOp  # Of a type alias.
CAPITALISED = re.compile("_?[A-Z]+[a-z]")  # And no constant.
ASKED = {
    "the kind of a method": ("config.method.name", "EveryStepMethod"),
    "the kind of an exchange": (
        *("AutoExchange", "InStepExchange", "BackgroundExchange", "PeerExchange"),
        *("GroupExchange", "exchange.name"),
    ),
    "whether processes are a job": ("config.is_apart", "config.is_elastic"),
}


def main() -> None:
    files = {path: path.read_text() for room in ROOMS for path in _files(room)}
    trees = {path: ast.parse(text) for path, text in files.items()}
    lines = {path: _code_lines(text, trees[path]) for path, text in files.items()}
    program = {p: t for p, t in trees.items() if p.parts[0] in PROGRAM}
    for what, names in ASKED.items():
        found = sorted(str(p) for p, t in program.items() if _asks(t, names))
        print(f"files that ask for {what}: {len(found)}\n  {' '.join(found)}")
    stays = Counter(_room(p) for p, t in program.items() for _ in _with_config(t))
    print(f"functions that take a whole config: {stays.total()}\n  {dict(stays)}")
    total = Counter()
    for path, numbers in lines.items():
        total[_room(path)] += len(numbers)
        total[path.parts[0]] += len(numbers) * (len(path.parts) > 2)
    print("lines of code")
    for room, count in sorted(total.items()):
        print(f"  {count:6} {room}")
    long = {p: len(n) for p, n in lines.items() if p in program and len(n) > LONG_FILE}
    print(f"files of more than {LONG_FILE} lines of code: {len(long)}")
    for path, count in long.items():
        print(f"  {count:6} {path}")
    _print_functions(program, lines)
    for what, found in (
        ("class", classes(program)),
        ("alias", aliases(program)),
        ("file", file_names(program)),
    ):
        same = {name: places for name, places in found.items() if len(places) > 1}
        print(f"{what} names that several have: {len(same)}")
        for name, places in sorted(same.items()):
            print(f"  {name:24} {' '.join(places)}")


def classes(program: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Returns the files that define a class of each name."""
    found = defaultdict[str, list[str]](list)
    for path, tree in program.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path))
    return found


def aliases(program: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Returns the files that define a type alias of each name, or a class of it."""
    found, of_classes = defaultdict[str, list[str]](list), classes(program)
    for path, tree in program.items():
        for node in tree.body:
            match node:
                case ast.Assign([ast.Name(name)], value):
                    is_alias = isinstance(value, KINDS) and CAPITALISED.match(name)
                case ast.AnnAssign(ast.Name(name), kind):
                    is_alias = ast.unparse(kind).endswith("TypeAlias")
                case _:
                    continue
            if is_alias:
                found[name].append(str(path))
    return {name: places + of_classes.get(name, []) for name, places in found.items()}


def file_names(program: Iterable[Path]) -> dict[str, list[str]]:
    """Returns the files of each name, without those that Python gives a meaning."""
    found = defaultdict[str, list[str]](list)
    for path in program:
        if path.stem not in ("__init__", "__main__"):
            found[path.name].append(str(path))
    return found


def _with_config(tree: ast.Module) -> Iterator[Function]:
    """Functions with an argument that is a `Config`."""
    for function in _functions(tree):
        kinds = (argument.annotation for argument in _arguments(function))
        if any(isinstance(x, ast.Name) and x.id == "Config" for x in kinds):
            yield function


def _print_functions(
    program: dict[Path, ast.Module], lines: dict[Path, set[int]]
) -> None:
    sizes, widths = {}, {}
    for path, tree in program.items():
        for function in _functions(tree):
            own = range(function.lineno, (function.end_lineno or 0) + 1)
            name = f"{path}:{function.name}"
            sizes[name] = len(lines[path] & {*own})
            widths[name] = len(_arguments(function))
    for what, of, most in (
        ("lines of code", sizes, LONG_FUNCTION),
        ("arguments", widths, WIDE_SIGNATURE),
    ):
        over = {name: count for name, count in of.items() if count > most}
        print(f"functions of more than {most} {what}: {len(over)}")
        for name, count in sorted(over.items(), key=lambda item: -item[1]):
            print(f"  {count:6} {name}")


def _files(room: str) -> list[Path]:
    return [p.relative_to(ROOT) for p in sorted((ROOT / room).rglob("*.py"))]


def _room(path: Path) -> str:
    """The folder of a file within a package, or the file's top folder."""
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


def _asks(tree: ast.Module, names: Collection[str]) -> bool:
    """Whether a file reads an attribute, or a name, of these."""
    found = (ast.unparse(x) for x in ast.walk(tree) if isinstance(x, NAMES))
    return any(name.endswith(of) for name in found for of in names)


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _arguments(function: Function) -> list[ast.arg]:
    found = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [one for one in found if one.arg not in ("self", "cls")]


def _code_lines(text: str, tree: ast.Module) -> set[int]:
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            match node.body[:1]:
                case [ast.Expr(ast.Constant(str())) as docstring]:
                    lines -= {*range(docstring.lineno, (docstring.end_lineno or 0) + 1)}
    return lines


if __name__ == "__main__":
    main()
