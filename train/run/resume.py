"""How a run starts or resumes: from which config and which state.

`decentjax resume RUN` takes the config from the run's newest checkpoint.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decentjax import Rounds, WorkerState
from decentjax.optim import ScaleByAccumAdamState
from train.cli.config_json import (
    HOOKS,
    PLACES,
    changes,
    differences,
    from_fields,
    read_fields,
    to_json,
    with_defaults,
)
from train.config import Config, DistributedConfig, OptimizerConfig
from train.job.provenance import OTHER_GRAPH, provenance_changes, provenance_of
from train.models.gpt2 import read_gpt2
from train.plain_files import read_object
from train.run.nonfinite import Check
from train.run.rate_jumps import say_jump
from train.run.run_info import command_line
from train.run.scores import read_trained
from train.run.setup import Run
from train.store.checkpoints import (
    DamagedError,
    choose,
    find_checkpoints,
    restore,
    saved_fields,
    saved_provenance,
    verify,
)
from train.store.fits import MisfitError
from train.store.folder import holder, process_folders
from train.store.log import warn
from train.store.regroup import How, restore_rows

# These decide what a run measures and where it runs, not what it trains.
FREE = (
    "task.data",
    "task.decoding",
    "task.eval_processes",
    "task.eval_rows",
    "task.num_eval_windows",
    "task.sample_bytes",
    "task.sample_prompt",
    "task.sample_tokens",
    "task.tokens",  # A run begins with what it has found in place of "auto".
    "data.num_processes",
    "workers.devices_per_worker",
    "workers.processes_per_worker",
    "evaluation",
    "checkpoint",
    "log",
    "exchange",
    "distributed",
    "workers.where",
    *HOOKS,
)

OF_GRAPH = "topology", "workers", "method", "policy"


class Resume(NamedTuple):
    """How a run resumes.

    Args:
      step: step of the checkpoint; by default the newest that can be read.
      changes: names of fields, such as "optimizer.learning_rate", that may differ from
        the checkpoint's.
      workers: how another number of workers takes the saved models, as in
        `restore_rows`; None refuses another number.
    """

    step: int | None = None
    changes: tuple[str, ...] = ()
    workers: How | None = None


def saved_config(run_dir: Path, step: int | None, trust: Sequence[str] = ()) -> Config:
    """Returns the config of a run's checkpoint, without the place in its old job.

    Args:
      run_dir: folder of the run.
      step: step of the checkpoint; by default the newest.
      trust: modules and files of the user's own classes and functions.

    Raises:
      ValueError: if there is no such checkpoint.
    """
    path, fields = _saved(run_dir, step)
    try:
        config = from_fields(fields, trust)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    # The addresses of the processes are no longer true.
    given = config.distributed
    distributed = DistributedConfig(
        start_seconds=given.start_seconds, step_deadline=given.step_deadline
    )
    return dataclasses.replace(config, distributed=distributed)


def _saved(run_dir: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    """The fields of a run's config, and where they are from."""
    # Peers have one config, and may have checkpoints of different steps, or none.
    path = run_dir / "config.json"
    if process_folders(run_dir) and path.exists():
        return path, read_fields(path)
    found = find_checkpoints(run_dir)
    if not found.steps and (trains := holder(run_dir)):
        raise ValueError(f"{run_dir} has no checkpoint yet: {trains} trains in it")
    path = found.steps[choose(found, run_dir, step)[0]]
    return path, saved_fields(path)


def what_changed(path: Path, step: int, run: Run, resume: Resume) -> list[str]:
    """Returns a phrase for each field that trains differently than at a checkpoint.

    `num_steps` may grow; any other such field must be named in `resume.changes`.

    Raises:
      ValueError: if another field differs, or the run is past its end.
    """
    config = run.config
    if config.num_steps < step:
        raise ValueError(
            f"{path} has done {step} steps, more than num_steps = {config.num_steps}: "
            "give a larger --num-steps, or an earlier --step"
        )
    # Both from JSON, where a tuple is a list.
    saved = with_defaults(saved_fields(path), type(config.task))
    now = json.loads(to_json(config))
    before, after = (x["workers"]["num_workers"] for x in (saved, now))
    allowed = FREE + resume.changes
    if before != after:
        _check_workers(path, before, after, run, resume)
        allowed += ("workers", "topology")
    if now["num_steps"] > saved["num_steps"]:
        allowed += ("num_steps",)
    trained = trained_by(saved, allowed), trained_by(now, allowed)
    refused = differences(*trained)
    if refused:
        name, _, value = next(changes(*trained))
        words = " ".join(map(str, value)) if isinstance(value, list) else value
        raise ValueError(
            f"{path} was trained with other settings: {', '.join(refused)}; to change "
            f"what is trained, give decentjax resume --{name.replace('_', '-')} "
            f"{words}"
        )
    return differences(trained_by(saved), trained_by(now))


def _check_workers(
    path: Path, before: int, after: int, run: Run, resume: Resume
) -> None:
    """Raises a ValueError if a run cannot continue with another number of workers."""
    if run.place.watch is not None:
        raise ValueError(
            f"{path} is of one process of {before} workers, and there are {after}: "
            "peers keep their number"
        )
    if resume.workers is None:
        raise ValueError(
            f"{path} was trained with other settings: workers.num_workers was {before} "
            f"and is {after}; say what becomes of the {before} models, with "
            "--resume.workers mean, repeat or select"
        )
    plan = run.method.plan
    sums = isinstance(plan, Rounds) and plan.keeps_sums
    sums |= run.config.optimizer.name == "exact_diffusion"
    if sums and resume.workers != "mean":
        raise ValueError(
            "method.tracking, exact_diffusion and methods that keep sums carry parts "
            "of a sum over all workers, of which --resume.workers "
            f"{resume.workers} would drop or repeat some: take mean"
        )
    if resume.workers == "select" and after > before:
        raise ValueError(
            f"--resume.workers select takes the first of {before} workers, and there "
            f"are {after}: take repeat or mean"
        )


class Begin(NamedTuple):
    """Where a run starts or resumes.

    Args:
      step: number of steps done.
      state: state of all workers.
      facts: facts for the log.
    """

    step: int
    state: WorkerState
    facts: dict[str, Any]


def begin_new(run: Run, init_from: Path | None, trust: Sequence[str] = ()) -> Begin:
    """Starts a run.

    Args:
      run: the run.
      init_from: folder of another run, whose mean model all workers start from, or of a
        GPT-2 in Hugging Face's layout.
      trust: modules and files of that run's own classes and functions.

    Raises:
      ValueError: if the folder already holds a run, or the other run's model does not
        fit the config.
    """
    found = find_checkpoints(run.folder)
    if found.steps:
        raise ValueError(
            f"{run.folder} already holds a run, saved after step {max(found.steps)}: "
            f"go on with decentjax resume {run.folder}, or choose another folder "
            "with --run-dir"
        )
    if init_from is None:
        return Begin(0, run.state(), {})
    path = init_from / "config.json"
    if path.exists() and "model_type" in (fields := read_object(path)):
        model = getattr(run.config.task, "model", None)
        params = read_gpt2(init_from, fields, model)
        return Begin(0, run.state((params, ())), {"init_from": str(init_from)})
    trained = read_trained(init_from, trust=trust)
    facts = {"init_from": str(init_from), "init_step": trained.step}
    return Begin(0, run.state(trained.mean()), facts)


def begin_again(run: Run, resume: Resume, check: Check) -> Begin:
    """Resumes from a checkpoint, by default the newest that is whole.

    Args:
      run: the run.
      resume: how the run resumes.
      check: raises where a state is not finite.

    Raises:
      ValueError: if no checkpoint fits.
    """
    config, run_dir = run.config, run.folder
    state = run.state()  # Any state, for structure and placement.
    found = find_checkpoints(run_dir)
    steps = choose(found, run_dir, resume.step)
    for name, reason in found.skipped.items():
        warn(f"left out {run_dir}/checkpoints/{name}: it {reason}")
    for step in steps:
        why = f"the checkpoint of step {step} of {run_dir} cannot be used: "
        try:
            verify(found.steps[step])
        except DamagedError as error:
            if step == steps[-1]:
                raise ValueError(f"{why}it {error}; steps {steps} are there") from error
            warn(f"{why}it {error}")
            continue
        changed = what_changed(found.steps[step], step, run, resume)
        try:
            restored = _restored(found.steps[step], step, state, resume)
            restored = _in_windows(restored, found.steps[step], config.optimizer)
            check(restored, step)
        except Exception as error:
            # In a job other processes may have read it, and would resume from it; and
            # where the state is another, so it is in the checkpoints before.
            is_last = jax.process_count() > 1 or step == steps[-1]
            if is_last or isinstance(error, MisfitError):
                raise ValueError(f"{why}{error}; steps {steps} are there") from error
            warn(f"{why}{error}")
        else:
            edited = _edited(run, found.steps[step], step, changed)
            facts: dict[str, Any] = {"resumed": command_line(sys.argv)}
            if changed or edited:
                facts["changed"] = changed + edited
            if changed:
                saved = with_defaults(saved_fields(found.steps[step]))
                facts |= say_jump(saved, run, step, changed)
            return Begin(step, restored, facts)
    raise AssertionError("choose returns at least one step")


def _edited(run: Run, path: Path, step: int, changed: list[str]) -> list[str]:
    """What is another than at a checkpoint, beside the config; with a warning."""
    found = provenance_changes(saved_provenance(path), provenance_of(run.config))
    if any(phrase.startswith(OF_GRAPH) for phrase in changed):
        found = [phrase for phrase in found if phrase != OTHER_GRAPH]
    if found and jax.process_index() == 0:
        warn(f"since step {step} was saved: {', '.join(found)}")
    return found


def _restored(path: Path, step: int, state: WorkerState, resume: Resume) -> WorkerState:
    num_saved = saved_fields(path)["workers"]["num_workers"]
    if resume.workers is None or num_saved == len(state.key):
        return restore(path, state)
    return restore_rows(path, state, num_saved, resume.workers, step)


def _in_windows(state: WorkerState, path: Path, now: OptimizerConfig) -> WorkerState:
    """The state with moments that are as old in windows of the config's steps.

    A window that has begun starts over.
    """
    before = with_defaults(saved_fields(path))["optimizer"]["accum_steps"]
    after = now.accum_steps

    def recounted(x: Any) -> Any:
        if not isinstance(x, ScaleByAccumAdamState):
            return x
        acc = jax.tree.map(jnp.zeros_like, x.acc)
        return x._replace(count=x.count // before * after, acc=acc)

    if before == after:
        return state
    moved = jax.tree.map(
        recounted,
        state.opt_state,
        is_leaf=lambda x: isinstance(x, ScaleByAccumAdamState),
    )
    return state._replace(opt_state=moved)


def trained_by(fields: dict[str, Any], names: Sequence[str] = FREE) -> dict[str, Any]:
    """Returns the fields of a config that decide what it trains.

    A class or function of the user's own is compared by its name: the file in which it
    is found may be called otherwise on another machine, or be imported as a module.

    Args:
      fields: fields of the config, as JSON has them.
      names: those that may differ, such as "task.data".
    """
    kept = without(fields, names)
    for section, _, name in (place.rpartition(".") for place in PLACES):
        part = kept.get(section, {}) if section else kept
        if isinstance(place := part.get(name), str):
            part[name] = place.rpartition(":")[2]
    return kept


def without(
    fields: dict[str, Any], names: Sequence[str], prefix: str = ""
) -> dict[str, Any]:
    """Returns the fields of a config but for those, named as "task.data"."""
    kept = {k: v for k, v in fields.items() if f"{prefix}{k}" not in names}
    return {
        k: without(v, names, f"{prefix}{k}.") if isinstance(v, dict) else v
        for k, v in kept.items()
    }
