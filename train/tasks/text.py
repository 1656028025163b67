"""Language modelling of token files, as nanoGPT lays them out: OpenWebText."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from train.data.batches import Batch, worker_steps
from train.data.text import Windows, check_tokens, read_tokens
from train.data.vocabulary import load_vocabulary
from train.fields import checked
from train.models.gpt import GPTConfig
from train.tasks.language import language, spread, window_shape
from train.tasks.task import Headline, Task, Totals


@checked
class TextTask:
    """A GPT on the tokens of `train.bin` and `val.bin`.

    Args:
      data: folder of the two, and of vocabulary.json where text is to be made.
      model: sizes of the GPT; its context is the window of the data, in tokens.
      num_eval_windows: held-out windows that an evaluation reads, evenly spread.
      eval_rows: held-out windows at a time.
      sample_prompt: what the sample at the end goes on from.
      sample_tokens: length of that sample, and of what `train.generate` adds.
    """

    data: str
    model: GPTConfig
    num_eval_windows: int = 2048
    eval_rows: int = 16
    sample_prompt: str = "The"
    sample_tokens: int = 100

    def __post_init__(self):
        if self.num_eval_windows < 1 or self.eval_rows < 1 or self.sample_tokens < 0:
            raise ValueError(
                "num_eval_windows and eval_rows must be positive, and sample_tokens "
                "not negative"
            )
        if not self.sample_prompt:
            raise ValueError("sample_prompt must not be empty")

    def build(self) -> Task:
        folder, context = Path(self.data), self.model.context
        model = language(self.model)

        def steps(*args: Any, **options: Any) -> grain.MapDataset[Batch]:
            check_tokens(folder, self.model.vocabulary)
            train, _ = read_tokens(folder)
            return worker_steps(Windows(train, context), *args, **options)

        @functools.cache
        def validation() -> list[np.ndarray]:
            _, held_out = read_tokens(folder)
            windows = Windows(held_out, context)
            count = min(len(windows), self.num_eval_windows)
            return spread(windows, count, self.eval_rows)

        def score_fn(params: Any, model_state: Any, windows: jax.Array) -> Totals:
            del model_state
            return {"loss": model.nats(params, windows)}

        def generate(params: Any, model_state: Any, lines: Sequence[str]) -> list[str]:
            del model_state
            vocabulary = load_vocabulary(folder / "vocabulary.json")
            known = len(vocabulary)
            return vocabulary.decode(
                [
                    model.go_on(params, prompt, self.sample_tokens, known)
                    for prompt in vocabulary.encode(lines)
                ]
            )

        def sample(params: Any, model_state: Any) -> str:
            try:
                return generate(params, model_state, [self.sample_prompt])[0]
            except FileNotFoundError as error:
                return f"none, as {error}"

        return Task(
            batch_shape=functools.partial(
                window_shape, context=context, dtype=np.uint16
            ),
            steps=steps,
            init=model.init,
            loss_fn=model.loss_fn,
            validation=validation,
            score_fn=score_fn,
            headline=Headline("loss", better="lower"),
            baselines=dict,
            sample=sample,
            generate=generate,
        )
