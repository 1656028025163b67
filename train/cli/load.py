"""What users name on the command line: files of Python, and folders."""

import difflib
import importlib.util
import re
import sys
import traceback
import typing
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from train.config import Config


# The configs that come with the program.
SHIPPED = Path(__file__).parents[2] / "configs"


def load_config(path: Path) -> "Config":
    """Returns the `config` of a config file, a file of Python.

    Args:
      path: the file, or the name of a config that comes with the program: "quickstart".

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it defines no config, or raises an error, with the line.
    """
    from train.config import Config  # Takes seconds, and not all commands need it.

    return load_value(find_config(path), "config", Config)


def no_file(what: str, path: Path) -> FileNotFoundError:
    """The error of a file that is missing; it may be one of the program's own."""
    known = path.suffix == ".py" and path.stem in shipped_configs()
    hint = f": did you mean {path.stem}, which comes with the program?" if known else ""
    return FileNotFoundError(f"there is no {what} {path}{hint}")


def own_sinks(path: Path, what: str = "config file") -> list[Any]:
    """Returns the `sinks` of a file of Python, which runs unless it has; often none.

    Raises:
      ValueError: if they are no functions.
    """
    path = find_config(path)
    module = sys.modules.get(str(path)) or load_file(path, what, str(path))
    sinks = getattr(module, "sinks", [])
    if not (isinstance(sinks, list | tuple) and all(map(callable, sinks))):
        raise ValueError(f"{path} must define `sinks` as functions, got {sinks!r}")
    return list(sinks)


def find_config(path: Path) -> Path:
    """Returns the file of a config that is given by its path or by its name.

    Raises:
      FileNotFoundError: if no config has the name, with the nearest one.
    """
    if path.suffix or len(path.parts) != 1:
        return path
    if not (found := SHIPPED / f"{path}.py").is_file():
        near = difflib.get_close_matches(str(path), shipped_configs(), n=1)
        hint = (
            f"did you mean {near[0]}?" if near else "give the path of one of your own"
        )
        raise FileNotFoundError(f"no config is named {path}: {hint}")
    return found


def shipped_configs() -> list[str]:
    """The names of the configs that come with the program."""
    return sorted(path.stem for path in SHIPPED.glob("*.py"))


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
    value = getattr(load_file(path, f"{name} file", str(path)), name, None)
    if not isinstance(value, kind):
        kinds = typing.get_args(kind) or (kind,)
        wanted = " or ".join(f"`{name} = {one.__name__}(...)`" for one in kinds)
        hint = "; a script of your own runs by decentjax launch --script"
        raise ValueError(
            f"{path} must define {wanted}, got {value!r}"
            + (hint if name == "config" else "")
        )
    return value


def load_file(path: Path, what: str, module_name: str) -> ModuleType:
    """Runs a file of Python, and returns it as a module.

    Args:
      path: the file.
      what: what it is called in errors.
      module_name: name of the module, which a run keeps for the classes of the file.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it raises an error, with the line.
    """
    if not path.is_file():
        raise no_file(what, path)
    if path.suffix != ".py":
        raise ValueError(f"a {what} is Python, NAME.py, got {path}")
    spec = importlib.util.spec_from_file_location(module_name, path)
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
        text = error.msg if isinstance(error, SyntaxError) else error
        where = f"{path}{_line(path, error)}"
        raise ValueError(f"{where}: {type(error).__name__}: {text}") from error
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
