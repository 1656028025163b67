"""The examples in docstrings run as pasted, and each public function has one."""

import doctest
import inspect
import operator
import os
import subprocess
import sys

import pytest

import decentjax
from tests.checkout import ROOT
from tests.pages import public_names

PUBLIC = {name: operator.attrgetter(name)(decentjax) for name in sorted(public_names())}
# An empty namespace: an example imports what it uses.
EXAMPLES = [
    example
    for name, thing in PUBLIC.items()
    for example in doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    if example.examples
]


def test_each_public_function_has_an_example():
    functions = {
        name for name, x in PUBLIC.items() if inspect.isfunction(inspect.unwrap(x))
    }
    assert len(functions) > 80
    assert functions - {example.name for example in EXAMPLES} == set()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs_as_pasted(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # For the address books of peers.
    if example.name.startswith("distributed."):  # Before jax uses a device.
        code = "".join(line.source for line in example.examples)
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        return
    report: list[str] = []
    results = doctest.DocTestRunner().run(example, out=report.append)
    assert results.failed == 0, "".join(report)
