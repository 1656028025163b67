"""Text from a trained model: `python -m train.generate RUN TEXT [TEXT ...]`.

A translation model translates each text, a language model continues it. Without a text,
each line of the standard input is one.
"""

import sys
from pathlib import Path
from typing import Annotated

import jax
import tyro

from train.cli.command import command
from train.run.scores import read_trained


def generate(
    run: Annotated[Path, tyro.conf.Positional],
    texts: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    worker: int | None = None,
    step: int | None = None,
) -> None:
    """Prints the translation or continuation of each text, a line for each.

    Args:
      run: folder of the run.
      texts: texts to translate or continue; by default the lines of the standard input.
      worker: number of the worker whose model is used; by default the mean model.
      step: step of the checkpoint; by default the newest.

    Raises:
      ValueError: if the run's models generate no text.
    """
    trained = read_trained(run, step)
    if trained.task.generate is None:
        raise ValueError(f"the models of {run} generate no text")
    lines = texts or tuple(line.rstrip("\n") for line in sys.stdin)
    # The first token is read from the text: an empty one has none to continue.
    if not all(lines):
        raise ValueError("a text is empty: the model needs a first word")
    model = trained.mean() if worker is None else trained.worker(worker)
    params, model_state = jax.device_put(model)
    for text in trained.task.generate(params, model_state, lines):
        print(text)


if __name__ == "__main__":
    with command():
        tyro.cli(generate, prog="python -m train.generate")
