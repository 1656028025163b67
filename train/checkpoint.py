"""Checkpoints of everything that a run needs to go on as if it had never stopped."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from decentjax import WorkerState
from train.config import CheckpointConfig, Config
from train.config_json import differences, to_json

# These decide when and how a run looks at itself and where it runs, not what it trains.
FREE = (
    "task.data",
    "task.decoding",
    "task.eval_processes",
    "task.eval_rows",
    "task.eval_size",
    "task.num_eval_windows",
    "task.sample_bytes",
    "task.sample_prompt",
    "task.sample_tokens",
    "data",
    "evaluation",
    "checkpoint",
    "log",
    "exchange",
    "straggler",
    "distributed",
)

# Its dataclasses hide their fields from type checkers.
_args: Any = ocp.args


class Checkpoints:
    """The checkpoints of one run folder, written in the background.

    A checkpoint holds the replicas, optimizer states, model states and random keys of
    all workers, the position in the data and the config.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.num_kept, enable_async_checkpointing=True
        )
        self._manager = _Manager((run_dir / "checkpoints").absolute(), options=options)

    def save(
        self, step: int, state: WorkerState, data_state: dict, config: Config
    ) -> None:
        """Starts saving `step`, the number of steps done; returns before it is done."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=_args.Composite(
                state=_args.StandardSave(state),
                data=_args.JsonSave(data_state),
                config=_args.JsonSave(json.loads(to_json(config))),
            ),
        )

    def newest(self) -> int | None:
        """Returns the newest step on disk, None where there is none."""
        return self._manager.latest_step()

    def restore(
        self, state: WorkerState, config: Config
    ) -> tuple[int, WorkerState, dict[str, Any]]:
        """Returns the newest step, its state and its position in the data.

        Args:
          state: a state of the same run, for its structure and its placement.
          config: of the run that goes on.

        Raises:
          ValueError: if it is of another config.
        """
        step = self.newest()
        assert step is not None, "there is a checkpoint to restore"
        self._check_config(step, config)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        restored = self._manager.restore(
            step,
            args=_args.Composite(
                state=_args.StandardRestore(abstract), data=_args.JsonRestore()
            ),
        )
        return step, restored["state"], restored["data"]

    def close(self) -> None:
        """Waits until all is on disk; an error in writing is raised here."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _check_config(self, step: int, config: Config) -> None:
        saved = self._manager.restore(
            step, args=_args.Composite(config=_args.JsonRestore())
        )["config"]
        now = json.loads(to_json(config))
        phrases = differences(_what_trains(saved), _what_trains(now))
        if phrases:
            raise ValueError(
                f"the checkpoint of step {step} is of another run: "
                f"{', '.join(phrases)}; resume with the config it was made with"
            )


def read_models(run_dir: Path, models: Any, step: int | None = None) -> tuple[int, Any]:
    """Returns the models of all workers from a run's folder, and nothing else of it.

    Args:
      run_dir: of the run.
      models: {"params": ..., "model_state": ...}, stacked, as shapes.
      step: of the checkpoint; by default the newest.

    Returns:
      The step, and the models as NumPy arrays, [N, ...].

    Raises:
      ValueError: if there is no such checkpoint, or it is of other models.
    """
    folder = (run_dir / "checkpoints").absolute()
    if not folder.is_dir():
        raise ValueError(f"{run_dir} holds no checkpoint of a run")
    # Not the optimizer's state, which is the larger part.
    handlers = {"state": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        steps = sorted(manager.all_steps())
        if not steps:
            raise ValueError(f"{run_dir} holds no checkpoint of a run")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ValueError(f"{run_dir} has checkpoints of steps {steps}, not {step}")
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        restored = manager.restore(
            step,
            args=_args.Composite(
                state=_args.PyTreeRestore(
                    item=models,
                    restore_args=jax.tree.map(lambda x: as_numpy, models),
                    partial_restore=True,
                )
            ),
        )
    pairs = zip(
        jax.tree.leaves_with_path(models),
        jax.tree.leaves(restored["state"]),
        strict=True,
    )
    for (path, wanted), got in pairs:
        if wanted.shape != got.shape:
            raise ValueError(
                f"the checkpoint is of another model: {jax.tree_util.keystr(path)} has "
                f"the shape {got.shape}, wanted {wanted.shape}"
            )
    return step, restored["state"]


def _what_trains(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a config that are not free."""
    kept = {k: v for k, v in fields.items() if f"{prefix}{k}" not in FREE}
    return {
        k: _what_trains(v, f"{prefix}{k}.") if isinstance(v, dict) else v
        for k, v in kept.items()
    }


class _Manager(ocp.CheckpointManager):
    """A manager that leaves it to the loop to ask jax whether the job is to stop."""

    def reached_preemption(self, step: int) -> bool:
        # Its thread would set back the count of steps that jax keeps of this process.
        del step
        return False
