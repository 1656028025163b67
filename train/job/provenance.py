"""Provenance of results: the code, the versions and the graph that decide numbers."""

import functools
import hashlib
import platform
import subprocess
import sys
import typing
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import decentjax
from train.cli.config_json import sources
from train.config import Config
from train.fields import fits
from train.plain_files import write_whole

PACKAGES = ("jax", "jaxlib", "flax", "grain", "numpy", "optax", "orbax-checkpoint")
OTHER_GRAPH = "the graph is another"


class Provenance(NamedTuple):
    """What decides the numbers of a run, beside its config.

    Args:
      versions: versions of decentjax, of packages below it and of Python.
      sources: digest of each of the user's own files, by its name.
      graph: digest of the topology's exchanges.
    """

    versions: dict[str, str]
    sources: dict[str, str]
    graph: str


def provenance_of(config: Config) -> Provenance:
    """Returns the provenance of what a config trains here and now."""
    own = {path.name: _digest(path.read_bytes()) for path in own_files(config)}
    graph = _digest(repr(config.graph.exchanges).encode())
    return Provenance(_versions(), own, graph)


def provenance_changes(fields: Any, now: Provenance) -> list[str]:
    """Returns a phrase for each difference, such as "sine.py was edited".

    Args:
      fields: an earlier provenance, as JSON has it; anything else differs in nothing.
      now: the provenance of today.
    """
    forms = typing.get_type_hints(Provenance)
    fields = fields if isinstance(fields, dict) else {}
    if not all(fits(fields.get(name), form) for name, form in forms.items()):
        return []
    before = Provenance(**{name: fields[name] for name in forms})
    known = before.sources.values()
    found = [f"{x} was edited" for x, y in now.sources.items() if y not in known]
    found += [OTHER_GRAPH] * (before.graph != now.graph)
    return found + [
        f"{name} was {old} and is {now.versions[name]}"
        for name, old in before.versions.items()
        if now.versions.get(name, old) != old
    ]


def own_files(config: Config) -> list[Path]:
    """Returns the files of what a config trains that is the user's own."""
    modules = {source: sys.modules.get(source) for source in sources(config)}
    files = [Path(getattr(found, "__file__", x)) for x, found in modules.items()]
    return [path for path in files if path.is_file()]


def keep_code(files: Iterable[Path], folder: Path) -> None:
    """Copies files of code, as NAME.DIGEST.py, beside what was kept before."""
    for path in files:
        text = path.read_text(encoding="utf-8")
        kept = folder / f"{path.stem}.{_digest(text.encode())}.py"
        folder.mkdir(exist_ok=True)
        write_whole(kept, text)


def commits(own: Iterable[Path]) -> dict[str, str]:
    """Returns the commits of decentjax and of the user's own files, where git has them.

    One ends in "-dirty" if its repository has changes.
    """
    files = {"decentjax": Path(decentjax.__file__)}
    files |= {path.name: path for path in own}
    found = {name: _commit(path.absolute()) for name, path in files.items()}
    return {name: commit for name, commit in found.items() if commit}


@functools.cache
def _commit(path: Path) -> str:
    """The commit of a file; empty if git does not track it, or is missing."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(path.parent), *words]
        return subprocess.check_output(
            command, text=True, timeout=10, stderr=subprocess.DEVNULL
        ).strip()

    try:
        git("ls-files", "--error-unmatch", path.name)
        return git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def _versions() -> dict[str, str]:
    own = {"decentjax": decentjax.__version__}
    return (
        own | {x: version(x) for x in PACKAGES} | {"Python": platform.python_version()}
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
