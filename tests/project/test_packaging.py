"""What the library needs, what the wheel holds, and the command that it brings."""

import ast
import os
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import decentjax
from tests.checkout import ROOT

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
    # What peers that encrypt need, imported where they begin.
    allowed |= {"cryptography"} if path.stem == "tls" else set()
    # As figures, imported where they are drawn.
    allowed |= {"matplotlib"} if path.stem == "analysis" else set()
    assert imported(path) <= allowed


def test_the_declared_needs_are_those():
    needs = PROJECT["project"]["dependencies"]
    assert {need.split(">")[0] for need in needs} == {"jax", "numpy", "optax", "scipy"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The wheel, as pip unpacks it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command of an unpacked wheel, in a folder of the user's."""
    return subprocess.run(
        [sys.executable, "-m", "decentjax", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_one_package(unpacked):
    version = PROJECT["project"]["version"]
    names = {path.name for path in unpacked.iterdir()}
    assert names == {"decentjax", f"decentjax-{version}.dist-info"}


def test_the_wheel_has_all_modules_configs_and_targets(unpacked):
    for folder in ("train", "configs"):
        inside = unpacked / "decentjax" / "_program" / folder
        files, own = (
            {
                path.relative_to(top).as_posix()
                for path in top.rglob("*")
                if path.suffix in (".py", ".toml")
            }
            for top in (inside, ROOT / folder)
        )
        assert files == own


def test_the_wheel_has_no_benches_and_says_where_they_are(unpacked, tmp_path):
    (tmp_path / "benches").mkdir()
    for name in ("__init__.py", "__main__.py", "input.py"):
        (tmp_path / "benches" / name).write_text("raise SystemExit('of the user')")
    for arguments in (["bench", "race", "--only", "a b"], ["benches.input"]):
        ended = run(unpacked, tmp_path, *arguments)
        line = shlex.join(["python", "-m", "decentjax", *arguments])
        assert (ended.returncode, ended.stdout, ended.stderr) == (
            1,
            "",
            "error: the benches are not installed with decentjax: clone its repository "
            f"at the tag v{decentjax.__version__}, and run `{line}` in the clone\n",
        )


@pytest.mark.slow
def test_a_train_of_the_user_shadows_nothing(unpacked, tmp_path):
    for name in ("train.py", "configs.py"):
        (tmp_path / name).write_text("raise SystemExit('of the user')")
    ended = run(unpacked, tmp_path, "train", "quickstart", "--help")
    assert ended.returncode == 0, ended.stderr
    assert "usage: decentjax train quickstart" in ended.stdout


@pytest.mark.slow
def test_a_config_of_the_user_imports_from_its_folder(unpacked, tmp_path):
    (tmp_path / "own_name.py").write_text("name = 'mine'")
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom own_name import name\n"
        "from configs.quickstart import config\n"
        "config = dataclasses.replace(config, name=name)"
    )
    ended = run(unpacked, tmp_path, "train", "mine.py", "--help")
    assert "(default: mine)" in ended.stdout, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "commands:\n  train "),
        ([], 0, "usage: decentjax COMMAND"),
        (["--version"], 0, f"decentjax {decentjax.__version__}\n"),
        (["trian"], 2, "no command 'trian': did you mean train?"),
        (["xyz"], 2, "no command 'xyz': decentjax --help lists them"),
        (["train", "quikstart"], 1, "no config is named quikstart: did you mean quick"),
        (["export"], 2, "decentjax checkpoint export --help"),
        (["resume"], 2, "decentjax resume RUN"),
        (["bench", "--help"], 0, "usage: decentjax bench {race,"),
    ],
)
def test_the_command_says_what_it_has(arguments, code, said, tmp_path):
    ended = run(ROOT, tmp_path, *arguments)
    assert (ended.returncode, said in ended.stdout + ended.stderr) == (code, True), (
        ended.stdout + ended.stderr
    )


def test_the_version_is_stated_once_more_and_the_same():
    assert decentjax.__version__ == PROJECT["project"]["version"]


def test_every_public_name_exists_and_has_a_docstring():
    for name in decentjax.__all__:
        thing = getattr(decentjax, name)
        assert isinstance(thing, str) or thing.__doc__, name
