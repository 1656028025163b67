"""What a trained model makes of a text: `python -m train.generate RUN TEXT [TEXT ...]`.

A model of translation translates each text, a language model goes on from it. Without a
text, each line of the standard input is one.
"""

import sys
from pathlib import Path
from typing import Annotated

import jax
import tyro

from train.cli import command
from train.run.evaluation import read_trained


def generate(
    run: Annotated[Path, tyro.conf.Positional],
    texts: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    worker: int | None = None,
    step: int | None = None,
) -> None:
    """Prints what the model of a run makes of each text, a line for each.

    Args:
      run: folder of the run.
      texts: by default the lines of the standard input.
      worker: whose model; by default the mean model.
      step: of the checkpoint; by default the newest.

    Raises:
      ValueError: if the run's models make no text.
    """
    trained = read_trained(run, step)
    if trained.task.generate is None:
        raise ValueError(f"the models of {run} make no text")
    lines = texts or tuple(line.rstrip("\n") for line in sys.stdin)
    if not all(lines):
        raise ValueError("a text is empty: give the model something to begin with")
    model = trained.mean() if worker is None else trained.worker(worker)
    params, model_state = jax.device_put(model)
    for text in trained.task.generate(params, model_state, lines):
        print(text)


if __name__ == "__main__":
    with command():
        tyro.cli(generate, prog="python -m train.generate")
