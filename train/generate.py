"""Generates from a trained model: `decentjax generate RUN TEXT [TEXT ...]`.

A translation model translates each text, a language model continues it and prints
tokens as they are generated, until it ends the text. Without a text, each line of the
standard input, UTF-8, is one. Your own task may take other lines.
"""

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from train.cli.command import command
from train.cli.options import Trust
from train.cli.read import from_options
from train.run.scores import read_trained
from train.tasks.sampling import Sampling

# --tokens, not --sampling.tokens.
SamplingArgument = Annotated[Sampling, tyro.conf.arg(name="")]
AS_CONFIGURED = Sampling()


def generate(
    run: Annotated[Path, tyro.conf.Positional],
    texts: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    worker: int | None = None,
    step: int | None = None,
    sampling: SamplingArgument = AS_CONFIGURED,
    trust: Trust = (),
) -> None:
    """Prints the translation or continuation of each text.

    Example: `decentjax generate runs/ring "import " "def main("`.

    Args:
      run: folder of the run.
      texts: texts to translate or continue, by default the lines of the standard
        input.
      worker: number of the worker whose model is used; by default the mean model.
      step: step of the checkpoint; by default the newest.
      sampling: how a language model's tokens are chosen.

    Raises:
      ValueError: if the run's models generate no text.
    """
    trained = read_trained(run, step, trust)
    if trained.run.task.generate is None:
        raise ValueError(f"the models of {run} generate no text")
    if not texts and sys.stdin.isatty():
        print("reads texts, a line each, up to Ctrl-D", file=sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):  # Whatever the locale, as in files.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    lines = texts or tuple(line.rstrip("\n") for line in sys.stdin)
    if not lines:
        raise ValueError('give a text, as in: decentjax generate RUN "def main("')
    _check_texts(lines)
    model = trained.mean() if worker is None else trained.worker(worker)
    params, model_state = jax.device_put(model)
    for pieces in trained.run.task.generate(params, model_state, lines, sampling):
        for piece in pieces:
            print(piece, end="", flush=True)
        print()


def _check_texts(texts: Sequence[str]) -> None:
    for text in texts:
        # The first token is read from the text: an empty one has none to continue.
        if not text:
            raise ValueError("a text is empty: the model needs a first word")
        if re.search("[\ud800-\udfff]", text):  # Bytes that are no character.
            raise ValueError(f"a text must be UTF-8, got {text[:40]!r}: convert it")


if __name__ == "__main__":
    with command():
        from_options(generate, prog="decentjax generate")
