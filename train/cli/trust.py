"""The classes and functions of a run that are its user's own, taken from trusted code.

A run's config.json names them, "my_tasks:MyTask" or "my.py:MyTask", and is data: it
never decides what is imported. Only `--trust MODULE_OR_FILE` does.
"""

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from train.cli.load import load_file


def find_own(place: str, trust: Sequence[str], what: str) -> Any:
    """Returns the class or function of a place.

    Args:
      place: MODULE:NAME, as `train.fields.place_of` writes it.
      trust: modules and files whose code may run.
      what: what the run has it for, for errors.

    Raises:
      ValueError: if its module is not trusted, or does not define it.
    """
    module_name, _, name = place.partition(":")
    source = next((one for one in trust if _is_of(module_name, one)), None)
    if source is None:
        for one in trust:
            if one.endswith(".py") and not Path(one).is_file():
                raise ValueError(
                    f"there is no file {one} to trust; this run's {what} is {place}: "
                    f"add --trust {module_name}"
                )
        raise ValueError(
            f"this run's {what} is {place}, which is not part of decentjax; if you "
            f"trust it, add --trust {module_name}"
        )
    module = sys.modules.get(module_name) or _load(source, module_name)
    found = vars(module).get(name)
    # What the module has imported is not its own: else os.system would be, of many.
    if not callable(found) or getattr(found, "__module__", None) != module_name:
        raise ValueError(f"{source} does not define {name}, which is this run's {what}")
    return found


def find_task(place: str, trust: Sequence[str]) -> type:
    """Returns the class of a task, see `find_own`.

    Raises:
      ValueError: if it is no dataclass, too.
    """
    found = find_own(place, trust, "task")
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"this run's task is {place}, which is not a dataclass")
    return found


def _is_of(module_name: str, source: str) -> bool:
    """Whether a run's module is the trusted one; of a file that was moved, its name."""
    names = Path(module_name).name, Path(source).name
    return module_name == source or (source.endswith(".py") and names[0] == names[1])


def _load(source: str, module_name: str) -> ModuleType:
    if source.endswith(".py"):
        return load_file(Path(source), "trusted file", module_name)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--trust {source} is not a module or file: {error}"
        ) from error
