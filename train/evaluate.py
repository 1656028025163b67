"""Scores of a finished run: `decentjax evaluate RUN [--workers 0 5]`.

The held-out loss of the mean model and of single workers, and the task's own scores:
top-1 and top-5, or BLEU and chrF of the test set as beam search translates it.
"""

from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from train.cli.command import command
from train.cli.options import Trust
from train.cli.plain_console import PlainConsole
from train.cli.read import from_options
from train.cli.tables import aligned, quantity, write_json
from train.run.scores import Model, build_score, read_trained

SHOWN_WORKERS = 4


def evaluate(
    run: Annotated[Path, tyro.conf.Positional],
    workers: tuple[int, ...] = (),
    step: int | None = None,
    trust: Trust = (),
) -> dict[str, dict[str, float]]:
    """Evaluates a run, prints its scores and writes them to RUN/evaluation.json.

    Example: `decentjax evaluate runs/ring --workers 0 7`.

    Args:
      run: folder of the run.
      workers: numbers of the workers to evaluate in addition to the mean model; by
        default four, evenly spread.
      step: step of the checkpoint; by default the newest.
    """
    trained = read_trained(run, step, trust)
    if not workers:
        last = len(trained.workers) - 1
        spread = np.linspace(0, last, min(last + 1, SHOWN_WORKERS)).astype(int)
        workers = tuple(trained.workers[row] for row in spread)
    chosen = {"mean model": trained.mean()}
    chosen |= {f"worker {number}": trained.worker(number) for number in workers}
    # Once, as each batch of the held-out data needs all of them.
    models: dict[str, Model] = jax.device_put(chosen)
    console = PlainConsole()
    with console.status(f"{len(models)} models on the held-out data"):
        scores = build_score(trained.run.task)(list(models.values()))
    # In the order of `chosen`: on a device a dict is sorted by its names as text.
    by_name = dict(zip(models, scores, strict=True))
    results = {name: by_name[name] for name in chosen}
    if trained.run.task.judge is not None:
        for number, (name, model) in enumerate(models.items()):
            with console.status(f"{name} generates ({number + 1} of {len(models)})"):
                results[name] |= trained.run.task.judge(*model)
    facts = {"step": trained.step, "steps": trained.steps, "scores": results}
    write_json(run / "evaluation.json", facts)
    names, units = list(next(iter(results.values()))), trained.run.task.units
    rows = [
        [model, *(quantity(of_model[x], units.get(x, ""), digits=4) for x in names)]
        for model, of_model in results.items()
    ]
    title = f"{run}, step {trained.step}"
    if len(set(trained.steps)) > 1:  # Of peers, which need not be at one step.
        title = f"{run}, steps of the processes: {', '.join(map(str, trained.steps))}"
    console.print(aligned(["", *names], rows, title=title))
    return results


if __name__ == "__main__":
    with command():
        from_options(evaluate, prog="decentjax evaluate")
