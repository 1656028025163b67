"""What the library costs: its step of one worker beside a hand-written optax loop."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from train.bench.gpu.gpu_alone import in_turns, our_step, plain_step
from train.bench.work import machine
from train.cli import load_config
from train.config import (
    Config,
    ExchangeConfig,
    TopologyConfig,
    WorkersConfig,
)

PLAIN, OURS = "plain optax", "one worker's step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBench:
    """Measures Adam's step of one worker, by hand and by the library, in turns.

    The batch is made up, so no data is needed.

    Args:
      configs: whose models are trained.
      batches: of each config, in the task's unit; small ones, to be done on a CPU.
      compute_dtype: of the models; CPUs have no matmuls in bfloat16 of their own.
      rounds: turns of each.
      steps: measured in a turn.
      out: folder for step.json and step.md.
    """

    configs: tuple[Path, ...] = (
        Path("configs/openwebtext_accumadamw_aer.py"),
        Path("configs/wmt14_de_accumadam_aer.py"),
        Path("configs/imagenet_accumadam_aer.py"),
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
        if min(self.rounds, self.steps, *self.batches) < 1:
            raise ValueError("rounds, steps and batches must be at least 1")


def main(bench: StepBench) -> int:
    console = Console()
    seconds = {}
    for path, batch in zip(bench.configs, bench.batches, strict=True):
        console.print(f"{path.stem}, batch {batch}")
        config = of_one_worker(load_config(path), batch, bench.compute_dtype)
        seconds[f"{path.stem}, batch {batch}"] = measure(config, bench, console)
    bench.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "machine": machine("jax"),
        "bench": json.loads(json.dumps(dataclasses.asdict(bench), default=str)),
        "seconds": seconds,
    }
    (bench.out / "step.json").write_text(json.dumps(facts, indent=1) + "\n")
    (bench.out / "step.md").write_text(table(seconds) + "\n")
    print(table(seconds))
    return 0


def of_one_worker(config: Config, batch: int, compute_dtype: Any) -> Config:
    """The config for one worker with this batch."""
    task: Any = config.task
    model = dataclasses.replace(task.model, compute_dtype=compute_dtype)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(task, model=model),
        workers=WorkersConfig(num_workers=1),
        topology=TopologyConfig(name="complete"),
        exchange=ExchangeConfig(where="in_step"),
        step=dataclasses.replace(
            config.step, algorithm="awc", batch_per_worker=batch, num_micro_batches=1
        ),
    )


def measure(config: Config, bench: StepBench, console: Console) -> dict[str, float]:
    """Median seconds of a step, of both."""
    task = config.task.build()
    shapes = task.batch_shape(config.step.batch_per_worker)
    batch = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    adam = optax.adamw(1e-4)
    plain, _ = plain_step(config, task, adam, batch)
    contestants = {PLAIN: plain, OURS: our_step(config, task, adam, batch)}
    return in_turns(contestants, bench.rounds, bench.steps, console)


def table(seconds: dict[str, dict[str, float]]) -> str:
    """Returns Markdown: seconds of both, and their ratio."""
    lines = [f"| | {PLAIN}, s/step | {OURS}, s/step | ratio |", "|---" * 4 + "|"]
    for name, both in seconds.items():
        plain, ours = both[PLAIN], both[OURS]
        lines.append(f"| {name} | {plain:.3f} | {ours:.3f} | {ours / plain:.3f} |")
    return "\n".join(lines)
