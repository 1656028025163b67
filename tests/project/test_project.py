"""Files for GitHub, containers and clusters: facts agree, and commands run."""

import ast
import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import decentjax
from tests.checkout import ENV, ROOT
from tests.counts import PROGRAM, classes, file_names

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FORMS = sorted((ROOT / ".github").rglob("*.yml"))


def python_versions() -> list[str]:
    classifiers = "\n".join(PROJECT["project"]["classifiers"])
    return re.findall(r"Python :: (\d+\.\d+)$", classifiers, re.MULTILINE)


def test_ci_runs_the_oldest_and_the_newest_python():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    versions = python_versions()
    assert jobs["run"]["strategy"]["matrix"]["python"] == [versions[0], versions[-1]]
    assert jobs["run"]["steps"][-1]["run"].startswith(".ci/run ")
    assert (ROOT / ".ci" / "run").is_file()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_are_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_no_file_is_tracked_that_a_tool_has_left():
    """Such as a wheel: whatever is no text is named here."""
    files = ["git", "ls-files", "--eol"]
    lines = subprocess.check_output(files, cwd=ROOT, text=True).splitlines()
    binary = {line.split("\t")[1] for line in lines if line.startswith("i/-text")}
    known = {f"tests/runs_0.{minor}.0.tar.xz" for minor in (2, 3, 4)}
    assert binary == known | {"docs/report.png", "tests/peers.npz"}


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == decentjax.__version__
    papers = (ROOT / "docs" / "papers.md").read_text()
    assert f"version = {{{decentjax.__version__}}}" in papers


def test_the_image_has_what_the_wheel_is_made_of():
    text = (ROOT / "Dockerfile").read_text()
    copied = {
        source
        for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
        for source in line.split()
    }
    assert all((ROOT / source).exists() for source in copied)
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["only-include"], "pyproject.toml", "README.md"} <= copied
    assert set(re.findall(r"python:([\d.]+)-slim", text)) == {python_versions()[-1]}
    extras = re.findall(r"EXTRAS=([\w,]+)", text)
    assert {x for one in extras for x in one.split(",")} <= {
        *PROJECT["project"]["optional-dependencies"]
    }


@pytest.mark.slow
def test_each_pod_of_the_job_set_runs_a_process_of_one_job():
    job_set = yaml.safe_load((ROOT / "configs" / "jobset.yaml").read_text())
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    arguments = [x.replace("$(JOB_COMPLETION_INDEX)", "3") for x in container["args"]]
    host = f"{job_set['metadata']['name']}-{job['name']}-0-0"
    port = container["ports"][0]["containerPort"]
    address = f"{host}.{job_set['spec']['network']['subdomain']}:{port}"
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == 4
    assert f"--distributed.num-processes={spec['completions']}" in arguments
    assert f"--distributed.coordinator={address}" in arguments
    done = subprocess.run(
        [sys.executable, "-m", "decentjax", *arguments, "--help"],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


FLAKY = """
import ctypes
import os
from pathlib import Path

def test_at_the_second_try():
    tried = Path(__file__).with_suffix(".tried")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried or {ends}

def test_always():
    assert {always}
"""


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    ("ends", "count", "always", "when", "passes"),
    [
        ("False", 3, True, "", True),
        ("os.abort()", 3, True, "", True),  # As a fault in compiled code would.
        ("os.abort()", 10, True, "", False),  # Some tests have not run.
        ("ctypes.PyDLL(None).pause()", 3, True, "", True),  # No Python runs in it.
        ("False", 3, False, "", False),
        ("False", 3, True, "nightly", False),
    ],
)
def test_ci_tries_a_test_that_fails_once_more_but_at_night(
    ends, count, always, when, passes, tmp_path
):
    text = (ROOT / ".ci" / "run").read_text()
    (function,) = re.findall(r"^tests\(\) \{\n.*?^\}\n", text, re.DOTALL | re.MULTILINE)
    (options,) = re.findall(r"-m pytest (-n \d+ .*?) -m", text)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    files = [f"test_{number}.py" for number in range(count)]
    for file in files:
        (tmp_path / file).write_text(FLAKY.format(ends=ends, always=always))
    slow = "slow" if when else "slow and not nightly"
    config = f"-c {ROOT}/pyproject.toml --rootdir . -o faulthandler_timeout=3 ."
    run = f'tests first "{python}" -m pytest {options} {config}'
    script = f"{function}\n{run}\necho it passes"
    found = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "scratch": str(tmp_path), "slow": slow},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.stdout.endswith("it passes\n") == passes, found
    assert (found.returncode == 0) == passes
    if passes:
        listed = (tmp_path / "flaky").read_text().splitlines()
        wanted = [f"flaky: {file}::test_at_the_second_try" for file in files]
        assert sorted(line.split(" - ")[0] for line in listed) == wanted


@pytest.mark.slow
def test_two_files_alone_know_the_kinds_of_methods():
    """As the guide on extending says."""
    counts = [sys.executable, str(ROOT / "tests" / "counts.py")]
    found = subprocess.run(counts, capture_output=True, text=True, check=True)
    _, files, *_ = found.stdout.splitlines()
    assert files.split() == ["train/config/method_section.py", "train/run/method.py"]


def test_no_test_file_imports_another():
    """What several need is in a helper, whose name does not begin with `test_`."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len({file.name for file in files}) == len(files)
    imports = re.compile(r"\b(from|import) [\w., ]*\btest_")
    assert [file.name for file in files if imports.search(file.read_text())] == []


def test_a_name_of_a_class_or_file_means_one_thing():
    files = [path for room in PROGRAM for path in sorted((ROOT / room).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in files}
    for named in (classes(trees), file_names(trees)):
        assert not {x: found for x, found in named.items() if len(found) > 1}
