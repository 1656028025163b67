"""What the library needs, and what the wheel holds."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

import decentjax

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize(
    "path", sorted((ROOT / "decentjax").rglob("*.py")), ids=lambda path: path.stem
)
def test_the_library_needs_few_packages_alone(path):
    allowed = {"decentjax", "jax", "numpy", "optax", "scipy", *sys.stdlib_module_names}
    assert imported(path) <= allowed


def test_the_declared_needs_are_those():
    needs = PROJECT["project"]["dependencies"]
    assert {need.split(">")[0] for need in needs} == {"jax", "numpy", "optax", "scipy"}


def test_the_wheel_holds_the_library_alone():
    found = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert found == {"include": ["decentjax*"]}


def test_the_version_is_stated_once_more_and_the_same():
    assert decentjax.__version__ == PROJECT["project"]["version"]


def test_every_public_name_exists_and_has_a_docstring():
    for name in decentjax.__all__:
        thing = getattr(decentjax, name)
        assert isinstance(thing, str) or thing.__doc__, name
