"""Sections of a config that are a few numbers each."""

import math
from typing import Literal

from train.config.checks import check_at_least, check_at_most
from train.config.duration import Duration
from train.fields import checked
from train.xla import read_options

MOST_READERS = 1024  # Each is a process.


@checked
class DataConfig:
    """How the data is read.

    Args:
      num_processes: number of processes that read and decode ahead, per training
        process; 0 uses a thread instead.
      skew: "dirichlet" and its concentration alpha split each class among the workers
        in random shares: with 0.1 a worker has few classes. None splits evenly.
    """

    num_processes: int = 0
    skew: tuple[Literal["dirichlet"], float] | None = None

    def __post_init__(self):
        check_at_least(self, 0, "num_processes")
        check_at_most(self, MOST_READERS, "num_processes")
        if self.skew is not None and not 0 < self.skew[1] < math.inf:
            raise ValueError(
                f"data.skew needs a positive concentration, got {self.skew[1]}"
            )


@checked
class StepConfig:
    """One training step.

    Args:
      batch_per_worker: batch size per worker and step, in the task's unit: windows,
        images, or for translation tokens on each side.
      num_micro_batches: number of parts of that batch, computed one after another.
      message_dtype: dtype in which models are sent; None for their own.
      not_finite: what to do on NaN or infinity: "stop" ends the run, and does not save
        them; "quarantine" drops the update of the worker, which continues with the
        average of its neighbours, and logs it.
      xla_options: XLA options NAME=VALUE for steps compiled for a mesh with their
        exchange inside, and for the programs of compared seeds on a mesh;
        "recommended" stands for those of `train.xla`. Options of another platform, such
        as xla_gpu_... on a TPU, are ignored. Empty for XLA's defaults.
    """

    batch_per_worker: int = 8
    num_micro_batches: int = 1
    message_dtype: Literal["bfloat16"] | None = None
    not_finite: Literal["stop", "quarantine"] = "stop"
    xla_options: tuple[str, ...] = ("recommended",)

    def __post_init__(self):
        check_at_least(self, 1, "batch_per_worker", "num_micro_batches")
        # For its errors: all platforms accept the same forms.
        read_options(self.xla_options, platform="cpu")


@checked
class DistributedConfig:
    """Discovery of the processes of a job.

    Args:
      enabled: whether this process is one of several. Slurm and Open MPI provide the
        other fields, and so does `decentjax launch`.
      coordinator: HOST:PORT, or [HOST]:PORT for IPv6, the only address at which process
        0 listens; unused by peers.
      num_processes: P.
      process_id: index of this process, 0 to P - 1.
      start_seconds: timeout for all processes to join, in seconds.
      step_deadline: longest time of a phase of a step, in seconds, such as reading or
        computing; ten times as long to compile, save and evaluate. Then the job ends
        with code 72, and names the process that is late. "learned" is 30 times the
        median step, at least 300 s, in runs of several processes; None waits
        indefinitely.
    """

    enabled: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_seconds: int = 300
    step_deadline: Duration | Literal["learned"] | None = "learned"

    def __post_init__(self):
        check_at_least(self, 3, "start_seconds")
        given = self.step_deadline
        if given not in ("learned", None) and not 1 <= given <= 1e8:
            raise ValueError(
                "distributed.step_deadline must be from 1 to 1e8 s, 'learned', or None "
                f"to wait indefinitely, got {given}"
            )
        count, own = self.num_processes, self.process_id
        if not self.enabled:
            if (self.coordinator, count, own) != (None, None, None):
                # Otherwise each process would train alone, all in the same folder.
                raise ValueError(
                    "distributed.coordinator, num_processes and process_id need "
                    "distributed.enabled"
                )
            return
        if count is not None and own is not None and not 0 <= own < count:
            raise ValueError(
                f"distributed.process_id must be from 0 to {count - 1}, got {own}"
            )

    @property
    def deadline(self) -> float | None:
        """The deadline as the library takes it: None learns it, inf is none."""
        if self.step_deadline == "learned":
            return None
        return math.inf if self.step_deadline is None else self.step_deadline


@checked
class EvaluationConfig:
    """When the mean model and the workers' models are evaluated.

    Args:
      every_steps: steps between evaluations; the last step is always evaluated.
    """

    every_steps: int = 500

    def __post_init__(self):
        check_at_least(self, 1, "every_steps")


@checked
class CheckpointConfig:
    """When the run is saved, and how many checkpoints are kept.

    Args:
      every_steps: steps between checkpoints; each evaluation and the last step have one
        too.
      num_kept: number of newest checkpoints to keep; older ones are removed, including
        those of evaluations and the best one.
    """

    every_steps: int = 500
    num_kept: int = 2

    def __post_init__(self):
        check_at_least(self, 1, "every_steps", "num_kept")


@checked
class LogConfig:
    """What is logged, and when.

    Args:
      every_steps: steps between rows of metrics.jsonl and updates of the progress line.
      consensus_every_steps: steps between measurements of the consensus distance, which
        cost an all-reduce of the model.
      timeline: whether to record when each process computes, waits and exchanges, for
        the report; the run then waits for the end of each step.
      profile: FIRST:LAST, such as "100:110", traces with jax's profiler from the end of
        step FIRST to the end of step LAST.
      sinks: where rows go in addition to metrics.jsonl; each needs the extra of its
        name, except "tensorboard" and "prometheus".
    """

    every_steps: int = 10
    consensus_every_steps: int = 10
    timeline: bool = False
    profile: str | None = None
    sinks: tuple[
        Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"], ...
    ] = ("tensorboard",)

    def __post_init__(self):
        check_at_least(self, 1, "every_steps", "consensus_every_steps")
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"log.sinks must name each sink once, got {self.sinks}")
        if self.profile is not None and not self.profiled():
            raise ValueError(
                "log.profile must be FIRST:LAST, two numbers of steps of which the "
                f'second is larger, such as "100:110", got {self.profile!r}'
            )

    def profiled(self) -> range:
        """The steps to trace; step t begins when t steps are done."""
        first, _, last = (self.profile or "").partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            return range(0)
        return range(int(first), int(last))
