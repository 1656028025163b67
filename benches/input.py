"""The rate of the input pipeline beside that of the model, each measured alone."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benches.results import check_at_least, write_results
from train.cli.load import load_config
from train.cli.plain_console import PlainConsole
from train.cli.tables import markdown
from train.config import Config
from train.data.batches import Feed, feed
from train.data.vocabulary import PAD
from train.run.build import build_in_step, build_steps
from train.run.setup import Run, make_run

# The event that jax records once for each program that XLA compiles, also where the
# program comes from the persistent cache.
COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataBench:
    """Measures the input pipeline alone, and the simulated train step alone.

    Example: `decentjax bench data --configs digits_allreduce`.

    Args:
      configs: configs of the runs.
      steps: number of steps measured; the model trains on them once before.
      processes: number of processes that read ahead; by default that of the config.
      out: folder for data.json and data.md.
    """

    configs: tuple[Path, ...] = (
        Path("digits_accumadam_aer"),
        Path("numbers_accumadam_aer"),
        Path("stdlib_accumadamw_aer"),
    )
    steps: int = 100
    processes: int | None = None
    out: Path = Path("runs/data")

    def __post_init__(self):
        check_at_least(self, steps=1, processes=0)


class InputTiming(NamedTuple):
    """The measurements of a config; a step is that of all its workers.

    Args:
      name: name of the config.
      examples: examples of a step: images, windows or pairs.
      filled: share of the tokens of a step that are not padding, or 1.
      read: seconds per step of the input alone.
      trained: seconds per step of the model alone.
      shapes: number of different shapes of the batches.
      exchanges: number of different exchanges of the topology.
      compiled: number of programs of the train step that XLA compiled.
    """

    name: str
    examples: float
    filled: float
    read: float
    trained: float
    shapes: int
    exchanges: int
    compiled: int


def main(bench: DataBench) -> int:
    console = PlainConsole()
    results = []
    for path in bench.configs:
        with console.status(f"{path.name} ({len(results) + 1}/{len(bench.configs)})"):
            results.append(measure(load_config(path), bench.steps, bench.processes))
    facts = {"steps": bench.steps, "results": results}
    print(write_results(bench.out, "data", facts, table(results)))
    return 0


def measure(config: Config, steps: int, processes: int | None) -> InputTiming:
    """Reads the batches of some steps, then trains on them.

    Args:
      config: config of a run.
      steps: number of steps.
      processes: number of processes that read ahead; None for that of the config.
    """
    run = make_run(config)
    made = build_steps(run, run.place.workers)
    count = config.data.num_processes if processes is None else processes
    batches, read = _timed(feed(made, count), steps)
    trained, compiled = _train(run, batches)
    # Each leaf has the shape [workers, examples, ...].
    examples = [np.prod(jax.tree.leaves(batch)[0].shape[:2]) for batch in batches]
    return InputTiming(
        name=config.name,
        examples=float(np.mean(examples)),
        filled=_filled(batches),
        read=read,
        trained=trained,
        # XLA compiles a step for each pair of a shape and an exchange.
        shapes=len({str(jax.tree.map(np.shape, batch)) for batch in batches}),
        exchanges=len(set(run.method.graph)),
        compiled=compiled,
    )


@contextlib.contextmanager
def count_compiled() -> Iterator[Callable[[], int]]:
    """A context that counts the programs that XLA compiles in it."""
    count = 0

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        nonlocal count
        del duration_secs, kwargs
        count += event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def table(results: Sequence[InputTiming]) -> str:
    """Returns Markdown: examples per second of input and model, and programs."""
    head = [
        "",
        "input alone, examples/s",
        "model alone, examples/s",
        "input / model",
        "tokens not padding",
        "compiled",
        "shapes x exchanges",
    ]
    rows = [
        [
            result.name,
            f"{result.examples / result.read:.4g}",
            f"{result.examples / result.trained:.4g}",
            f"{result.trained / result.read:.1f}",
            f"{result.filled:.1%}",
            result.compiled,
            f"{result.shapes} x {result.exchanges}",
        ]
        for result in results
    ]
    return markdown(head, rows)


def _timed(batches: Feed, steps: int) -> tuple[list[Any], float]:
    """The arrays of some steps, and the seconds per step."""
    next(batches)  # Starts the processes, which takes seconds.
    start = time.monotonic()
    arrays = [next(batches).arrays for _ in range(steps)]
    seconds = (time.monotonic() - start) / steps
    batches.close()
    return arrays, seconds


def _train(run: Run, batches: list[Any]) -> tuple[float, int]:
    """Seconds per step, and the number of programs compiled in all steps together."""
    train_step, state = build_in_step(run), run.state()
    # On the device before the clock starts: this measures the model alone.
    placed = [jax.device_put(batch) for batch in batches]
    start = 0.0
    with count_compiled() as compiled:
        for _ in range(2):  # The first time it compiles; the second counts.
            jax.block_until_ready(state)
            start = time.monotonic()
            for t, batch in enumerate(placed):
                state, _ = train_step(state, batch, t)
        jax.block_until_ready(state)
        return (time.monotonic() - start) / len(batches), compiled()


def _filled(batches: Sequence[Any]) -> float:
    if not (isinstance(batches[0], dict) and "source" in batches[0]):
        return 1.0  # Only pairs of sentences are padded.
    sides = [batch[side] for batch in batches for side in ("source", "target")]
    return sum(int((side != PAD).sum()) for side in sides) / sum(s.size for s in sides)
