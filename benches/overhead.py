"""What the library costs: its step of one worker beside a hand-written optax loop."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from benches.results import check_at_least, write_results
from benches.train_steps import (
    for_workers,
    in_turns,
    measured_step,
    our_step,
    plain_step,
    wrapped_step,
)
from train.cli.load import load_config
from train.cli.plain_console import PlainConsole
from train.cli.tables import markdown
from train.config import Config
from train.run.setup import make_run

PLAIN, OURS = "plain optax", "one worker's step"
MEASURED = "with the norms of its tensors"
WRAPPED = "plain optax, wrapped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBench:
    """Measures Adam's step of one worker, by hand, by the library, and by `wrap`.

    The batch consists of ones, so no data is needed.

    Example: `decentjax bench step --rounds 5`.

    Args:
      configs: configs whose models are trained.
      batches: batch of each config, in the task's unit; small enough for a CPU.
      compute_dtype: dtype of the models' activations; CPUs have no matmuls in bfloat16
        of their own.
      rounds: number of turns of each step.
      steps: steps measured in a turn.
      out: folder for step.json and step.md.
    """

    configs: tuple[Path, ...] = (
        Path("openwebtext_accumadamw_aer"),
        Path("wmt14_de_accumadam_aer"),
        Path("imagenet_accumadam_aer"),
    )
    batches: tuple[int, ...] = (1, 512, 8)
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    rounds: int = 3
    steps: int = 3
    out: Path = Path("runs/step")

    def __post_init__(self):
        if len(self.batches) != len(self.configs):
            raise ValueError(
                f"each config needs a batch: {len(self.configs)} configs and "
                f"{len(self.batches)} batches"
            )
        check_at_least(self, rounds=1, steps=1)
        if min(self.batches) < 1:
            raise ValueError(f"batches must be at least 1, got {self.batches}")


def main(bench: StepBench) -> int:
    console = PlainConsole()
    seconds = {}
    for path, batch in zip(bench.configs, bench.batches, strict=True):
        config = of_one_worker(load_config(path), batch, bench.compute_dtype)
        name = f"{config.name}, batch {batch}"
        console.print(name)
        seconds[name] = measure(config, bench, console)
    facts = {"bench": bench, "seconds": seconds}
    print(write_results(bench.out, "step", facts, table(seconds)))
    return 0


def of_one_worker(config: Config, batch: int, compute_dtype: str) -> Config:
    """Returns the config for one worker with this batch."""
    task: Any = config.task
    model = dataclasses.replace(task.model, compute_dtype=compute_dtype)
    task = dataclasses.replace(task, model=model)
    return for_workers(dataclasses.replace(config, task=task), 1, "complete", batch)


def measure(config: Config, bench: StepBench, console: Console) -> dict[str, float]:
    """Returns the median seconds of each step."""
    task = config.task.build()
    # The task's own shapes: for translation the batch is one of tokens, not of pairs.
    shapes = task.batch_shape(config.step.batch_per_worker)
    batch = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    # A constant rate: the schedule and the clipping of the config are left out of both.
    run = make_run(config, task=task, optimizer=optax.adamw(1e-4))
    plain, _ = plain_step(run, batch)
    runners = {
        PLAIN: plain,
        OURS: our_step(run, batch),
        MEASURED: measured_step(run, batch),
        WRAPPED: wrapped_step(run, batch),
    }
    return in_turns(runners, bench.rounds, bench.steps, console)


def table(seconds: dict[str, dict[str, float]]) -> str:
    """Returns Markdown: the seconds of each step, and what ours add."""
    names = PLAIN, OURS, MEASURED, WRAPPED
    heads = ["", *(f"{name}, s/step" for name in names)]
    rows = []
    for name, found in seconds.items():
        plain, ours, norms, wrapped = times = [found[key] for key in names]
        ratios = ours / plain, norms / ours, wrapped / plain
        rows.append([name, *(f"{x:.4g}" for x in times), *(f"{x:.3f}" for x in ratios)])
    ends = "ours / plain", "norms / ours", "wrapped / plain"
    return markdown([*heads, *ends], rows)
