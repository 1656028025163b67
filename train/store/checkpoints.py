"""Finds, verifies and reads checkpoints of all that a run needs to resume exactly.

RUN/checkpoints/STEP has two parts: `state`, the replicas, optimizer states, model
states and random keys of all workers, and `run`, the step and the config. The step is
also the position in the data. Its manifest has the hash of each file: what is damaged
is never taken for a checkpoint.
"""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from decentjax import WorkerState
from train.cli.config_json import as_fields
from train.job.distributed import gather
from train.plain_files import read_json
from train.store.earlier import as_now, forms_before
from train.store.fits import (
    OTHER_STRUCTURE,
    MisfitError,
    check_fits,
    explained,
    is_key,
    key_kind,
)
from train.store.log import warn
from train.store.manifest import check_files

# Its dataclasses hide their fields from type checkers.
_args: Any = ocp.args

UNFINISHED = "*.orbax-checkpoint-tmp*"  # As orbax names what it is still writing.


class Found(NamedTuple):
    """The checkpoints in a run's folder.

    Args:
      steps: folder of each checkpoint by its step, oldest first.
      skipped: reason why anything else in RUN/checkpoints is no checkpoint, by name.
    """

    steps: dict[int, Path]
    skipped: dict[str, str]


def find_checkpoints(run_dir: Path) -> Found:
    """Returns the checkpoints of a run, whose files hold the step of each.

    A copy under another number, a link, an empty folder or one whose save did not end
    is no checkpoint. `verify` reads the arrays too.
    """
    steps, skipped = {}, {}
    folder = run_dir / "checkpoints"
    # By length and then by name: 5, 10, 100.
    paths = [path for path in folder.glob("*") if not path.match(UNFINISHED)]
    for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
        try:
            steps[_step_of(path)] = path
        except ValueError as error:
            skipped[path.name] = str(error)
        except OSError as error:  # Another user's.
            skipped[path.name] = f"cannot be read: {error.strerror}"
    return Found(steps, skipped)


def choose(found: Found, run_dir: Path, step: int | None = None) -> list[int]:
    """Returns the given step, or by default all, newest first.

    Raises:
      ValueError: if there is no such checkpoint, or none at all.
    """
    why = "".join(f"; {name} {reason}" for name, reason in found.skipped.items())
    if not found.steps:
        raise ValueError(f"{run_dir} holds no checkpoint of a run{why}")
    if step is None:
        return list(found.steps)[::-1]
    if step not in found.steps:
        raise ValueError(
            f"{run_dir} has checkpoints of steps {list(found.steps)}, not {step}{why}"
        )
    return [step]


class DamagedError(ValueError):
    """The checksum of a file of a checkpoint does not match."""


def verify(path: Path) -> None:
    """Checks all files of a checkpoint against its manifest.

    A collective: each process of a job reads a part of the files.

    Raises:
      DamagedError: if a checksum does not match, with the file's name; on all
        processes.
    """
    reason = None
    try:
        check_files(path, share=(jax.process_index(), jax.process_count()))
    except ValueError as error:
        reason = str(error)
    for found in gather("checkpoint", reason):
        if found is not None:
            raise DamagedError(found)


def newest(run_dir: Path, step: int | None = None) -> tuple[int, Path]:
    """Returns the newest checkpoint that is whole, or that of a step. A collective.

    Raises:
      ValueError: if there is none, or that of the step is damaged.
    """
    found = find_checkpoints(run_dir)
    for one in choose(found, run_dir, step):
        try:
            verify(found.steps[one])
        except DamagedError as error:  # No other: where a peer is lost, none may be.
            why = f"the checkpoint of step {one} of {run_dir} {error}"
            if step is not None:
                raise ValueError(why) from error
            warn(why)
        else:
            return one, found.steps[one]
    raise ValueError(f"{run_dir} holds no checkpoint that is whole")


def set_aside(run_dir: Path, step: int) -> list[str]:
    """Moves newer checkpoints than `step` to RUN/set_aside, and returns their names.

    Also anything else whose name is a number, as a later save could not replace it.
    """
    found = find_checkpoints(run_dir)
    names = [str(other) for other in found.steps if other > step]
    names += [name for name in found.skipped if name.isdecimal()]
    for name in names:
        target = run_dir / "set_aside" / name
        while target.exists() or target.is_symlink():
            target = target.with_name(f"{target.name}_")
        target.parent.mkdir(exist_ok=True)
        (run_dir / "checkpoints" / name).rename(target)
    return names


def saved_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of the config that a checkpoint was made with."""
    try:
        return as_fields(_read_run(path)["config"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def saved_provenance(path: Path) -> Any:
    """Returns the provenance of a checkpoint's run, as JSON has it, if it has any."""
    return _read_run(path).get("provenance")


def restore(path: Path, state: WorkerState) -> WorkerState:
    """Returns the state of a checkpoint.

    Args:
      path: folder of the checkpoint.
      state: any state of the same run, for structure and placement.

    Raises:
      MisfitError: if it is that of another model, optimizer or kind of random keys.
    """
    try:
        return _restore(path, state)
    except MisfitError:
        if saved_provenance(path) is not None:  # Not of an earlier version.
            raise
        for before in forms_before(state):
            with contextlib.suppress(MisfitError):
                return as_now(_restore(path, before), state)
        raise


def _restore(path: Path, state: WorkerState) -> WorkerState:
    check_fits(path / "state", state)
    try:
        with ocp.StandardCheckpointer() as reader, explained():
            return reader.restore((path / "state").absolute(), state)
    except ValueError as error:
        if "structures do not match" not in str(error):
            raise
        raise MisfitError(OTHER_STRUCTURE) from error


def read_models(run_dir: Path, models: Any, step: int | None = None) -> tuple[int, Any]:
    """Reads the models of all workers from a run's folder, without optimizer state.

    Args:
      run_dir: folder of the run.
      models: shapes of {"params": ..., "model_state": ...}, stacked.
      step: step of the checkpoint; by default the newest.

    Returns:
      The step, and the models as NumPy arrays, [N, ...].

    Raises:
      ValueError: if there is no such checkpoint, whole and of these models.
    """
    step, path = newest(run_dir, step)
    try:
        return step, read_part(path, models)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint of step {step} of {run_dir} cannot be used: {error}"
        ) from error


def read_part(path: Path, shapes: Any) -> Any:
    """Reads a part of a checkpoint's state, as NumPy arrays; random keys are jax's.

    Args:
      path: folder of the checkpoint.
      shapes: shapes of the arrays, by names of the state's fields.

    Raises:
      MisfitError: if they have other shapes, or are of another kind of random keys.
    """
    check_fits(path / "state", shapes, part=True)
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    # A partial restore: the rest of the state would double the memory, or more.
    with ocp.PyTreeCheckpointer() as reader, explained():
        restored = reader.restore(
            (path / "state").absolute(),
            args=_args.PyTreeRestore(
                item=shapes,
                restore_args=jax.tree.map(lambda x: as_numpy, shapes),
                partial_restore=True,
            ),
        )

    def typed(wanted: Any, got: Any) -> Any:
        kind = key_kind(wanted) if is_key(wanted) else None
        return got if kind is None else jax.random.wrap_key_data(got, impl=kind)

    return jax.tree.map(typed, shapes, restored)


def _step_of(path: Path) -> int:
    """Returns the step that the files of a checkpoint hold.

    Raises:
      ValueError: if the folder is no checkpoint, with the reason.
    """
    if path.is_symlink() or not path.is_dir():
        raise ValueError("is not a folder")
    if not (path / "state").is_dir():
        raise ValueError("holds no state")
    check_files(path, part="run/")
    step = _read_run(path)["step"]
    if path.name != str(step):
        raise ValueError(f"is a copy of step {step}")
    return step


def _read_run(path: Path) -> dict[str, Any]:
    """The step and the config in a checkpoint."""
    try:
        # Not by orbax, whose reads are collectives in a job: any process reads this.
        run = read_json(path / "run" / "metadata")
        if type(run["step"]) is int and isinstance(run["config"], dict):
            return run
    except (OSError, ValueError, TypeError, LookupError):
        pass
    raise ValueError("does not say which step it is of")
