"""Which functions of the source each test executes: `pytest -p tests.executed`.

A plugin of pytest, for Python 3.12 and newer. It leaves a file for each test file in
`build/executed`; there `tests/mutants.py` finds the tests of a function.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.bugs import ROOT, ROOTS

FOLDER = ROOT / "build" / "executed"

_TOOL = 4  # Any number of a tool that coverage, debuggers and profilers do not take.
_INSIDE = tuple(f"{ROOT / root}/" for root in ROOTS)
_running: list[set[str]] = [set()]  # What runs now comes last: a fixture of a test.
_of_fixtures: dict[Any, set[str]] = {}
_of_tests: dict[str, dict[str, Any]] = {}
_passed: set[str] = set()


def pytest_configure() -> None:
    sys.monitoring.use_tool_id(_TOOL, "executed")
    sys.monitoring.register_callback(
        _TOOL, sys.monitoring.events.PY_START, _has_started
    )
    sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)


def pytest_unconfigure() -> None:
    sys.monitoring.free_tool_id(_TOOL)


def _has_started(code: CodeType, _: int) -> object:
    if code.co_filename.startswith(_INSIDE):
        path = Path(code.co_filename).relative_to(ROOT)
        _running[-1].add(f"{path}:{named(code.co_qualname)}")
    return sys.monitoring.DISABLE  # Once a test is enough.


def named(qualname: str) -> str:
    """Returns the function with a name around a lambda or a comprehension."""
    return qualname.partition(".<locals>.<")[0]


@contextlib.contextmanager
def _recorded(functions: set[str]) -> Iterator[None]:
    _running.append(functions)
    sys.monitoring.restart_events()
    yield
    _running.pop()
    sys.monitoring.restart_events()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """What a fixture executes, each of its tests does."""
    with _recorded(_of_fixtures.setdefault(fixturedef, set())):
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Iterator[None]:
    start, functions = time.monotonic(), set()
    with _recorded(functions):
        result = yield
    for fixtures in item._fixtureinfo.name2fixturedefs.values():
        functions |= _of_fixtures.get(fixtures[-1], set())
    if item.nodeid in _passed:
        seconds = round(time.monotonic() - start, 2)
        _of_tests[item.nodeid] = {"seconds": seconds, "functions": sorted(functions)}
    if nextitem is None or nextitem.path != item.path:
        FOLDER.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_of_tests, indent=1)
        (FOLDER / item.path.with_suffix(".json").name).write_text(text)
        _of_tests.clear()
    return result
