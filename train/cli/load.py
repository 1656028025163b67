"""What users name on the command line: files of Python, and folders."""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import typing
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from train.cli.families import shipped_configs

if TYPE_CHECKING:
    from train.config import Config


def load_config(path: Path) -> "Config":
    """Returns a config, of a file of Python.

    Args:
      path: a file, which defines `config`; a config of a file, by its name,
        `FILE.py:NAME`; or the name of one that comes with the program: "quickstart".

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it defines no such config, or raises an error, with the line.
    """
    from train.config import Config  # Takes seconds, and not all commands need it.

    file, name = find_config(path)
    module = load_file(file, "config file")
    configs = {x: one for x, one in vars(module).items() if isinstance(one, Config)}
    # By the name of its variable or, as a family's `config` has another, by its own.
    named = {one.name: one for one in configs.values()}
    if found := configs.get(name) or named.get(name):
        return found
    if not configs or (name == "config" and hasattr(module, name)):
        value = getattr(module, "config", None)
        raise ValueError(
            f"{file} must define `config = Config(...)`, got {value!r}; a script of "
            "your own runs by decentjax launch --script"
        )
    raise ValueError(
        f"{file} has no `{name}`: use {file}:{next(iter(named))}, or another of its "
        f"configs {', '.join(named)}"
    )


def no_file(what: str, path: Path) -> FileNotFoundError:
    """The error of a file that is missing; it may be one of the program's own."""
    hint = ""
    if path.suffix == ".py" and path.stem in shipped_configs():
        hint = f": did you mean {path.stem}, which comes with the program?"
    elif path.with_suffix(".py").is_file():
        hint = f": did you mean {path.with_suffix('.py')}?"
    return FileNotFoundError(f"there is no {what} {path}{hint}")


def own_sinks(path: Path, what: str = "config file") -> list[Any]:
    """Returns the `sinks` of a file of Python, which runs unless it has; often none.

    Raises:
      ValueError: if they are no functions.
    """
    path, _ = find_config(path)
    module = load_file(path, what)
    sinks = getattr(module, "sinks", [])
    if not (isinstance(sinks, list | tuple) and all(map(callable, sinks))):
        raise ValueError(f"{path} must define `sinks` as functions, got {sinks!r}")
    return list(sinks)


def find_config(path: Path) -> tuple[Path, str]:
    """Returns the file of a config, and its name, by default that of the variable.

    Raises:
      FileNotFoundError: if no config has the name, with the nearest one.
    """
    file, _, name = str(path).rpartition(":")
    if file.endswith(".py"):
        return Path(file), name
    if path.suffix or len(path.parts) != 1:
        return path, "config"
    shipped, name = shipped_configs(), str(path)
    if name not in shipped:
        near = difflib.get_close_matches(name, shipped, n=1)
        own = path.with_suffix(".py")
        near = [own] if own.is_file() else near
        hint = (
            f"did you mean {near[0]}?" if near else "give the path of your own config"
        )
        raise FileNotFoundError(f"no config is named {name}: {hint}")
    return shipped[name], name


def load_value(path: Path, name: str, kind: Any) -> Any:
    """Returns the variable `name` of a file of Python.

    Args:
      path: the file.
      name: name of the variable.
      kind: class of its value, or a union of classes.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if its value is no `kind`, or the file raises an error, with the line.
    """
    value = getattr(load_file(path, f"{name} file"), name, None)
    if not isinstance(value, kind):
        kinds = typing.get_args(kind) or (kind,)
        wanted = " or ".join(f"`{name} = {one.__name__}(...)`" for one in kinds)
        raise ValueError(f"{path} must define {wanted}, got {value!r}")
    return value


def load_function(place: str, what: str) -> Any:
    """Returns a function of a file of Python, FILE.py:NAME, or of a module.

    Args:
      place: the file or module, and the name.
      what: the option that takes it, for errors.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if the text is not of that form, the file raises an error, or it has
        no such function.
    """
    file, _, name = place.rpartition(":")
    if not (file and name.isidentifier()):
        raise ValueError(f"{what} takes FILE.py:NAME, a function of yours, got {place}")
    module = _load(file, what)
    found = getattr(module, name, None)
    if not callable(found):
        known = [x for x, one in vars(module).items() if inspect.isfunction(one)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ValueError(f"{file} has no function {name}{hint}")
    return found


def _load(source: str, what: str) -> ModuleType:
    if source.endswith(".py"):
        return load_file(Path(source), f"{what} file")
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} {source} is no module or file: {error}") from error


# By its real path, the module of a file, and the text that has run.
_LOADED: dict[Path, tuple[ModuleType, bytes]] = {}


def load_file(path: Path, what: str, module_name: str | None = None) -> ModuleType:
    """Returns a file of Python as a module; it runs once, unless its text changes.

    So all configs of a file have the same classes and functions.

    Args:
      path: the file.
      what: what it is called in errors.
      module_name: name of the module, which a run keeps for the classes of the file; by
        default the path by which the file was loaded first.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it raises an error, with the line.
    """
    if not path.is_file():
        raise no_file(what, path)
    if path.suffix != ".py":
        raise ValueError(f"a {what} must be a Python file NAME.py, got {path}")
    real, text = path.resolve(), path.read_bytes()
    if real in _LOADED:
        known, has_run = _LOADED[real]
        is_here = sys.modules.get(known.__name__) is known
        if has_run == text and is_here and module_name in (None, known.__name__):
            return known
    spec = importlib.util.spec_from_file_location(module_name or str(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A class of the file is pickled with its code: the processes that read data cannot
    # import this module.
    sys.modules[spec.name] = module
    cloudpickle.register_pickle_by_value(module)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Also sys.exit(), which must not end the command.
        said = error.msg if isinstance(error, SyntaxError) else error
        where = f"{path}{_line(path, error)}"
        raise ValueError(f"{where}: {type(error).__name__}: {said}") from error
    _LOADED[real] = module, text
    return module


def check_folder(*paths: Path | None) -> None:
    """Raises for URLs, which `Path` would take for folders of this machine.

    Raises:
      ValueError: if a path is like gs://bucket/run.
    """
    for path in paths:
        if found := re.match(r"(\w+):/", str(path)):  # `Path` has made one / of two.
            raise ValueError(
                f"a folder must be in a file system of this machine, got {path}: "
                f"mount the storage behind {found[1]}:// and give its path"
            )


def _line(path: Path, error: BaseException) -> str:
    """The innermost line of the file in the error's traceback."""
    name = str(path.absolute())  # As the import system calls the file.
    if isinstance(error, SyntaxError) and error.filename == name:
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == name]
    return f", line {lines[-1]}" if lines else ""
