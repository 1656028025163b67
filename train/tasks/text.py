"""Language modelling of token files, in nanoGPT's layout: OpenWebText."""

import functools
from pathlib import Path
from typing import Any

import grain
import numpy as np

from train.data.batches import Batch, worker_steps
from train.data.token_files import Windows, check_tokens, read_tokens
from train.data.vocabulary import load_vocabulary
from train.fields import checked
from train.models.gpt import GPTConfig
from train.models.sizes import check_positive
from train.tasks.language import check_sample, language_task, spread
from train.tasks.task import Task


@checked
class TextTask:
    """A GPT on the tokens of `train.bin` and `val.bin`.

    Args:
      data: folder of the two, and of vocabulary.json where text is generated.
      model: sizes of the GPT; its context is the window of the data, in tokens.
      num_eval_windows: number of held-out windows of an evaluation, evenly spread.
      eval_rows: held-out windows per batch.
      sample_prompt: beginning of the sample.
      sample_tokens: length of what is generated after a prompt, in tokens.
    """

    data: str
    model: GPTConfig
    num_eval_windows: int = 2048
    eval_rows: int = 16
    sample_prompt: str = "The"
    sample_tokens: int = 100

    def __post_init__(self):
        check_positive(self, "num_eval_windows", "eval_rows")
        check_sample(self.sample_prompt, self.sample_tokens)

    def build(self) -> Task:
        folder, context = Path(self.data), self.model.context

        # Reads when it is called, as a task is also built where its data is missing.
        def steps(*args: Any, **options: Any) -> grain.MapDataset[Batch]:
            check_tokens(folder, self.model.vocabulary)
            train, _ = read_tokens(folder)
            return worker_steps(Windows(train, context), *args, **options)

        # Kept, as each evaluation of a run scores the same windows.
        @functools.cache
        def validation() -> list[np.ndarray]:
            _, held_out = read_tokens(folder)
            windows = Windows(held_out, context)
            count = min(len(windows), self.num_eval_windows)
            return spread(windows, count, self.eval_rows)

        return language_task(
            self.model,
            dtype=np.uint16,
            steps=steps,
            num_examples=lambda: len(Windows(read_tokens(folder).train, context)),
            validation=validation,
            score="loss",
            vocabulary=lambda: load_vocabulary(folder / "vocabulary.json"),
            prompt=self.sample_prompt,
            length=self.sample_tokens,
        )
