"""Tries whether tests notice deliberate bugs: `python tests/mutants.py`.

A bug that slips says that nothing looks at what it changes. `tests/bugs.py` derives the
bugs, of which some are drawn; `tests/mutants.toml` has those that no operator makes. A
derived bug is tried by the tests that execute its function, as recorded by
`pytest -p tests.executed`, or else by the test files that import its module.
"""

import argparse
import contextlib
import functools
import json
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.bugs import ROOT, ROOTS, Bug, bugs_of

FAILED = 1  # pytest's code where tests ran, and one failed.
FILE_SECONDS = 1  # To import a file of tests.
MAX_TESTS = 300  # Of one bug: by their names, pytest finds more slowly.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression of bugs")
    parser.add_argument("--count", type=int, default=20, help="bugs to draw")
    parser.add_argument("--seed", default="0", help="of the draw, such as a date")
    parser.add_argument("--by-hand", action="store_true", help="those of mutants.toml")
    parser.add_argument("--tests", help="arguments of pytest, for those that are found")
    parser.add_argument("--jobs", type=int, default=1, help="bugs tried at a time")
    parser.add_argument("--limit", type=float, default=150, help="seconds for each")
    parser.add_argument("--list", action="store_true", help="show the bugs alone")
    parser.add_argument("--intact", action="store_true", help="run without the bugs")
    parser.add_argument("--stay", action="store_true", help="keep copies and outputs")
    options = parser.parse_args()
    bugs = by_hand() if options.by_hand else derived()
    bugs = [bug for bug in bugs if re.search(options.only, f"{bug} {bug.tests}")]
    bugs = drawn(bugs, options.count, options.seed)
    bugs = [bug._replace(tests=options.tests or bug.tests) for bug in bugs]
    if options.list:
        print(*bugs, f"{len(bugs)} bugs", sep="\n")
        return 0
    return try_all(bugs, options)


def by_hand(path: Path = ROOT / "tests" / "mutants.toml") -> list[Bug]:
    """Returns the bugs of a list.

    Raises:
      ValueError: if snippets do not stand once in their files.
    """
    bugs, lost = [], []
    for name, entries in tomllib.loads(path.read_text()).items():
        text = (ROOT / name).read_bytes()
        for old, new, tests in entries:
            if (count := text.count(old.encode())) != 1:
                lost.append(f"{name} has {count} times: {old}")
            begin = text.find(old.encode())
            end = begin + len(old.encode())
            line = text.count(b"\n", 0, begin) + 1
            bugs.append(Bug(name, line, "", "by hand", begin, end, old, new, tests))
    if lost:
        raise ValueError("\n".join(lost))
    return bugs


def derived() -> list[Bug]:
    """Returns those that operators make of the source."""
    paths = [path for root in ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
    return [bug for path in paths for bug in bugs_of(str(path.relative_to(ROOT)))]


def drawn(bugs: list[Bug], count: int, seed: str) -> list[Bug]:
    """Draws from each file in turn, and within a file from each kind."""
    random.Random(seed).shuffle(bugs)
    bugs = in_turn(bugs, lambda bug: (bug.path, bug.kind))
    return in_turn(bugs, lambda bug: bug.path)[:count]


def in_turn(items: list, group: Callable[[Any], object]) -> list:
    """Orders items: first the first of each group, then the second of each."""
    seen = Counter()

    def turn(item: Any) -> int:
        seen[group(item)] += 1
        return seen[group(item)]

    return sorted(items, key=turn)


class Recorded(NamedTuple):
    """What a test took, and how many functions it executes."""

    seconds: float
    num_functions: int


def tests_of(bug: Bug, limit: float) -> list[str]:
    """Returns tests that may notice it, and take no longer than the limit.

    Half of them are those that execute little else. The others are one of each kind.
    """
    recorded = _recorded()
    tests = recorded[f"{bug.path}:{bug.function}"]
    if not tests:  # Such as a constant of the file.
        inside = [t for f, t in recorded.items() if f.startswith(f"{bug.path}:")]
        tests = {name: test for found in inside for name, test in found.items()}
    if not tests:
        return ["-m", "not slow", *_importing(bug.path)]
    names = random.Random(0).sample(sorted(tests), len(tests))
    own = sorted(names, key=lambda name: tests[name].num_functions)[: MAX_TESTS // 2]
    others = in_turn(names, lambda name: name.partition("[")[0])[:MAX_TESTS]
    chosen, files, left = [], Counter(), limit
    for name in list(dict.fromkeys([*own, *others]))[:MAX_TESTS]:
        path = name.partition("::")[0]
        seconds = tests[name].seconds + FILE_SECONDS * (path not in files)
        if seconds <= left:
            left, files[path] = left - seconds, files[path] + seconds
            chosen.append(name)
    return sorted(chosen, key=lambda name: files[name.partition("::")[0]])


@functools.cache
def _recorded() -> dict[str, dict[str, Recorded]]:
    """Returns the tests of each function, as far as their files are as recorded."""
    tests = defaultdict(dict)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = ROOT / "build" / "executed" / f"{path.stem}.json"
        if not file.is_file() or file.stat().st_mtime < path.stat().st_mtime:
            continue
        for name, test in json.loads(file.read_text()).items():
            one = Recorded(test["seconds"], len(test["functions"]))
            for function in test["functions"]:
                tests[function][name] = one
    return tests


def _importing(path: str) -> list[str]:
    """Returns the test files that import a module, or else a package around it."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    for length in range(len(parts), 0, -1):
        module = re.escape(".".join(parts[:length]))
        package, _, name = module.rpartition(r"\.")
        imports = re.compile(rf"\b{module}\b|from {package} import .*\b{name}\b")
        if found := [f for f in files if imports.search(f.read_text())]:
            return [str(f.relative_to(ROOT)) for f in found]
    return []


def try_all(bugs: list[Bug], options: argparse.Namespace) -> int:
    # A shell has its background jobs ignore Ctrl-C, and tests' processes would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="mutants"))
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(options.jobs):
        trees.put(copy(folder / str(number)))

    def tried(bug: Bug) -> bool:
        begin, tree = time.monotonic(), trees.get()
        try:
            code = run(bug, tree, options.limit, options.intact)
            if code is not None and code > FAILED:  # Are there tests without the bug?
                found = run(bug, tree, options.limit, True, "--collect-only")
                code = code if found else FAILED
        finally:
            trees.put(tree)
        is_noticed = code is None or code == FAILED or code < 0
        words = ("FAILS", "passes") if options.intact else ("noticed", "SLIPPED")
        word = "NO TEST RAN" if code and not is_noticed else words[not is_noticed]
        how = " as it hangs" if code is None else " as it crashes" * (code < 0)
        print(f"{word}{how}  {time.monotonic() - begin:.0f} s  {bug}", flush=True)
        return is_noticed if not options.intact else code == 0

    with ThreadPoolExecutor(options.jobs) as pool:
        good = sum(pool.map(tried, bugs))
    if options.stay:
        print(f"copies and outputs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    what = "pass without their bugs" if options.intact else "noticed"
    print(f"{good} of {len(bugs)} {what}, in {time.monotonic() - start:.0f} s")
    return good < len(bugs)


def copy(tree: Path) -> Path:
    """Copies the working tree, but for what git ignores."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in set(listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def run(bug: Bug, tree: Path, limit: float, is_intact: bool, *more: str) -> int | None:
    """Returns pytest's exit code on the tree with the bug, None where it hangs."""
    path = tree / bug.path
    text = path.read_bytes()
    if not is_intact:
        path.write_bytes(bug.changed(text))
    env = {
        "PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        # A bug that is made and mended within a second would be taken for the other.
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tree.parent / "cache"),
    }
    arguments = Path(f"{tree}.tests")  # They may be too long for a command line.
    tests = shlex.split(bug.tests) or tests_of(bug, limit / 5)
    arguments.write_text("\n".join(tests))
    options = ("-xq", "-p", "no:cacheprovider", f"--basetemp={tree}.tmp", *more)
    command = (sys.executable, "-m", "pytest", *options, f"@{arguments}")
    with open(f"{tree}.txt", "a") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=os.environ | env, stdout=output, stderr=output
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_all(tree)
            process.wait()
            path.write_bytes(text)


def end_all(tree: Path) -> None:
    """Ends what a bug may have left behind, in whatever session: it knows the tree."""
    mark = f"PYTHONPATH={tree}{os.pathsep}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
