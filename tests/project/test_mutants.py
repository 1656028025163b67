"""Deliberate bugs: what operators make of a line, and what becomes of a bug."""

import ast
import json
import os
import random
import re
import subprocess
import sys

import pytest

from tests import mutants
from tests.bugs import bugs_of
from tests.checkout import ROOT

BUGS = [
    ("if a < b:\n    f()", "boundary", "if a <= b:\n    f()"),
    ("x = a is not b", "opposite", "x = a is b"),
    ("x = a and (b or c)", "and for or", "x = a or (b or c)"),
    ("x = (a or b) and c", "condition dropped", "x = (True) and c"),
    ("x = not a", "not dropped", "x = a"),
    ("x = [a for a in b if c]", "filter dropped", "x = [a for a in b if True]"),
    ("x = a if b or c else d", "negated", "x = a if not (b or c) else d"),
    ("if a:\n    raise b", "check dropped", "if False:\n    raise b"),
    ("if a:\n    b = c", "never", "if False:\n    b = c"),
    ("if a:\n    b = c", "always", "if True:\n    b = c"),
    ("x = a if b else c", "always", "x = a"),
    ("x = a if b else c", "never", "x = c"),
    ("x = (a + b) * c", "operator", "x = (a - b) * c"),
    ("x += a", "operator", "x -= a"),
    ("x = (a - b) / c", "operands swapped", "x = (b - a) / c"),
    ("x = a + b * c", "operand dropped", "x = (b * c)"),
    ("x = -a", "sign dropped", "x = a"),
    ("x = a[1]", "off by one", "x = a[0]"),
    ("x = 0.5", "constant", "x = 1.0"),
    ("f(a, x=True)", "constant", "f(a, x=False)"),
    ("f(a, g(b, c))", "arguments swapped", "f(g(b, c), a)"),
    ("f(a, x=b, y=c)", "argument dropped", "f(a, y=c)"),
    ("f(a, b)", "argument dropped", "f(a, )"),
    ("x = np.any(a)", "another function", "x = np.all(a)"),
    ("x = f(a).astype(b)", "call dropped", "x = f(a)"),
    ("x = f(a, b)", "call dropped", "x = b"),
    ("f(a)", "statement dropped", "pass"),
    ("a.b = c", "statement dropped", "pass"),
    (
        "try:\n    a\nexcept B:\n    c",
        "error not caught",
        "try:\n    a\nexcept ():\n    c",
    ),
    ("x = a[1:]", "slice dropped", "x = a"),
    ("x, y = f()", "elements swapped", "y, x = f()"),
    ("x = ('a', b)", "element dropped", None),
    ("x = {a, b}", "element dropped", "x = {b}"),
    ("x = {'a': b, 'c': d}", "element dropped", "x = {'c': d}"),
]
UNSEEN = '''
"""1 + 1"""
from a import b

def f(x: int | None = None) -> tuple[int, float]:
    """-1"""
    y: dict[str, A | B]
    print(x, y)
    warnings.warn(f"not {1 + 1}", stacklevel=2)
    raise ValueError(f"{x + 1} for {not x}", 1)

class A:
    def __repr__(self):
        return str(1 + 1)
'''
PYTHON = '''
def doubled(x):
    """Returns 2 * x."""
    return 2 * x

def untested(x):
    return not x

PLACE = [3, 4][1]

def counted(x):
    n = len([])
    while n != x:
        n += PLACE - 3
    return n
'''
TESTS = """
import pytest
from decentjax import tiny

@pytest.fixture(scope="module")
def six():
    return tiny.doubled(3)

def test_six(six):
    assert six == 6

def test_three(six):
    assert tiny.counted(3) + 3 == six
    tiny.untested(3)
"""


@pytest.mark.parametrize(("before", "kind", "after"), BUGS, ids=lambda x: x)
def test_an_operator_makes_a_bug(before, kind, after):
    bugs = bugs_of("a.py", before.encode())
    made = [bug.changed(before.encode()).decode() for bug in bugs if bug.kind == kind]
    assert after in made if after else not made


def test_what_no_test_looks_at_stays():
    assert bugs_of("a.py", UNSEEN.encode()) == []


@pytest.mark.parametrize("path", ["decentjax/rounds.py", "train/run/optimizers.py"])
def test_a_file_with_a_bug_is_python(path):
    text = (ROOT / path).read_bytes()
    for bug in random.Random(path).sample(bugs_of(path), 40):
        assert ast.dump(ast.parse(bug.changed(text))) != ast.dump(ast.parse(text)), bug


def test_the_snippets_of_the_list_stand_once_in_the_source(tmp_path):
    bugs = mutants.by_hand()
    assert all(bug.old != bug.new and bug.tests for bug in bugs)
    assert all((ROOT / bug.tests.split()[0]).is_file() for bug in bugs)
    path = tmp_path / "mutants.toml"
    path.write_text(
        '"train/__init__.py" = [["nowhere", "there", "tests/project/test_readme.py"]]'
    )
    with pytest.raises(ValueError, match=r"train/__init__.py has 0 times: nowhere"):
        mutants.by_hand(path)


def test_each_file_and_each_kind_has_its_turn():
    letters = ["a1", "a2", "b1", "a3", "b2"]
    assert mutants.in_turn(letters, lambda x: x[0]) == ["a1", "b1", "a2", "b2", "a3"]


@pytest.fixture
def run(tmp_path):
    """Runs Python in a tiny project, without what pytest needs a second to load."""
    files = {"decentjax/__init__.py": "", "decentjax/tiny.py": PYTHON}
    files |= {"tests/test_tiny.py": TESTS, ".gitignore": "build/"}
    for name in ("bugs", "executed", "mutants"):
        files[f"tests/{name}.py"] = (ROOT / "tests" / f"{name}.py").read_text()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    env = {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(*command: str) -> str:
        line = (sys.executable, *command)
        environ = os.environ | env
        found = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True)
        return found.stdout.decode()

    return run


def test_a_bug_that_slips_is_listed(run):
    lines = run(
        "tests/mutants.py", "--only", "untested|doubled operator|: 1 => 2"
    ).splitlines()
    words = sorted(re.sub(r"  \d+ s", "", line) for line in lines)
    assert words[1:] == [
        "SLIPPED  decentjax/tiny.py:7 untested not dropped: not x => x",
        "noticed  decentjax/tiny.py:4 doubled operator: * => /",
        "noticed  decentjax/tiny.py:9 off by one: 1 => 2",
    ]
    assert words[0].startswith("2 of 3 noticed, in ")
    more = ("--tests", "tests/test_tiny.py -k six")
    found = run("tests/mutants.py", "--only", "counted statement", *more)
    assert "0 of 1 noticed" in found


@pytest.mark.slow
def test_a_bug_that_hangs_is_ended(run):
    only = ("--only", "counted statement", "--limit", "5")
    assert "noticed as it hangs  5 s" in run("tests/mutants.py", *only)
    assert "1 of 1 pass without their bugs" in run(
        "tests/mutants.py", *only, "--intact"
    )


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of 3.12")
def test_a_test_executes_what_its_fixtures_do(run, tmp_path):
    assert "2 passed" in run("-m", "pytest", "-p", "tests.executed")
    recorded = json.loads((tmp_path / "build/executed/test_tiny.json").read_text())
    six, three = (recorded[f"tests/test_tiny.py::test_{x}"] for x in ("six", "three"))
    assert six["functions"] == ["decentjax/tiny.py:doubled"]
    of_three = {f"decentjax/tiny.py:{x}" for x in ("doubled", "counted", "untested")}
    assert set(three["functions"]) == of_three
    assert "1 of 1 noticed" in run("tests/mutants.py", "--only", "doubled operator")
