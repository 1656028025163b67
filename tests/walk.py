"""The way of a config through a run: `python tests/walk.py`.

A stay is a function that is given the config, or the run that holds it; a climb is a
call into a file that imports the caller's, if only by way of others.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
START = "train/run/loop.py", "train", "config"
HOLDERS = ("config", "run")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Stay(NamedTuple):
    """A function that is given the parameter."""

    file: str
    function: str
    parameter: str


def main() -> None:
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for room in ("train", "decentjax")
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    imports = {file: dict(_imports(tree, trees)) for file, tree in trees.items()}
    first = Stay(*START)
    stays, calls, left = {first}, set[tuple[str, str]](), [first]
    while left:
        stay = left.pop()
        for after in _passed(stay, trees, imports[stay.file]):
            calls.add((stay.file, after.file))
            if after not in stays:
                stays.add(after)
                left.append(after)
    climbs = [one for one in sorted(calls) if _reaches(one[1], one[0], imports)]
    for stay in sorted(stays):
        print(f"  {stay.file} {stay.function}")
    rooms = {stay.file for stay in stays}
    print(f"stays: {len(stays)}, in {len(rooms)} files; climbs: {len(climbs)}")
    for climb in climbs:
        print(f"  {' -> '.join(climb)}")


def _passed(
    stay: Stay, trees: dict[str, ast.Module], imported: dict[str, tuple[str, str]]
) -> Iterator[Stay]:
    """The functions to which a function passes its parameter on."""
    for call in ast.walk(_function(trees[stay.file], stay.function)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        file, name = imported.get(call.func.id, (stay.file, call.func.id))
        try:
            names = _parameters(_function(trees[file], name))
        except LookupError:
            continue
        given = list(zip(names, call.args, strict=False))
        given += [(x.arg or "", x.value) for x in call.keywords]
        for parameter, value in given:
            if ast.unparse(value).rpartition(".")[2] in HOLDERS:
                yield Stay(file, name, parameter)


def _function(tree: ast.Module, name: str) -> Function:
    """A function, or what makes an object of a class.

    Raises:
      LookupError: if there is none.
    """
    for node in tree.body:
        if isinstance(node, Function) and node.name == name:
            return node
        if isinstance(node, ast.ClassDef) and node.name == name:
            for inner in node.body:
                if isinstance(inner, Function) and inner.name == "__init__":
                    return inner
    raise LookupError(name)


def _parameters(function: Function) -> list[str]:
    found = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [one.arg for one in found if one.arg != "self"]


def _imports(
    tree: ast.Module, trees: dict[str, ast.Module]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """What a file imports: its name there, the file, and its name in that file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            path = node.module.replace(".", "/")
            for one in node.names:
                for file in (f"{path}.py", f"{path}/{one.name}.py"):
                    if file in trees:
                        yield one.asname or one.name, (file, one.name)


def _reaches(
    file: str, other: str, imports: dict[str, dict[str, tuple[str, str]]]
) -> bool:
    """Whether a file imports another one, directly or by way of others."""
    seen, left = {file}, [file]
    while left:
        for found, _ in imports[left.pop()].values():
            if found == other and found != file:
                return True
            if found not in seen:
                seen.add(found)
                left.append(found)
    return False


if __name__ == "__main__":
    main()
