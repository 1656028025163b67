"""Language modelling of the text of a Hugging Face dataset."""

import functools
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np

from train.data.batches import Batch, worker_steps
from train.data.hub_datasets import Tokens, read_splits, read_text
from train.data.token_files import Windows
from train.data.vocabulary import Bytes, Vocabulary, load_vocabulary
from train.fields import checked
from train.models.gpt import GPTConfig
from train.models.sizes import check_positive
from train.tasks.language import check_sample, language_task, spread
from train.tasks.task import Task


@checked
class HubTextTask:
    """A GPT on a column of text, which is tokenized in memory at the start.

    For more text than that, `decentjax prepare text` writes the files of `TextTask`.

    Args:
      data: folder that `save_to_disk` has written, else a name on the hub.
      model: sizes of the GPT; its context is the window of the data, in tokens.
      subset: name of one of several subsets on the hub.
      column: name of the column of text.
      tokenizer: JSON file of a tokenizer that has <|endoftext|>; None for bytes.
      held_out_share: share of the documents that is held out, where the dataset has no
        split for it.
      num_eval_windows: number of held-out windows of an evaluation, evenly spread.
      eval_rows: held-out windows per batch.
      sample_prompt: beginning of the sample.
      sample_tokens: length of what is generated after a prompt, in tokens.
    """

    data: str
    model: GPTConfig
    subset: str | None = None
    column: str = "text"
    tokenizer: str | None = None
    held_out_share: float = 0.05
    num_eval_windows: int = 512
    eval_rows: int = 64
    sample_prompt: str = "The"
    sample_tokens: int = 100

    def __post_init__(self):
        check_positive(self, "num_eval_windows", "eval_rows")
        check_sample(self.sample_prompt, self.sample_tokens)
        if not 0 < self.held_out_share < 1:
            raise ValueError(
                f"held_out_share must be in (0, 1), got {self.held_out_share}"
            )

    def build(self) -> Task:
        context, in_bytes = self.model.context, self.tokenizer is None
        vocabulary = functools.cache(self._vocabulary)

        # Read when first used, as a task is also built where its data is missing.
        @functools.cache
        def text() -> Tokens:
            splits = read_splits(self.data, self.subset, self.held_out_share)
            return read_text(splits, self.column, vocabulary())

        def steps(*args: Any, **options: Any) -> grain.MapDataset[Batch]:
            return worker_steps(Windows(text().train, context), *args, **options)

        @functools.cache
        def validation() -> list[np.ndarray]:
            windows = Windows(text().held_out, context)
            count = min(len(windows), self.num_eval_windows)
            return spread(windows, count, self.eval_rows)

        return language_task(
            self.model,
            dtype=np.int32,
            steps=steps,
            validation=validation,
            score="bits_per_byte" if in_bytes else "loss",
            unit=lambda nats: nats / jnp.log(2) if in_bytes else nats,
            vocabulary=vocabulary,
            prompt=self.sample_prompt,
            length=self.sample_tokens,
        )

    def _vocabulary(self) -> Vocabulary | Bytes:
        """The tokens, of which the model must know all."""
        path = self.tokenizer
        found = Bytes() if path is None else load_vocabulary(Path(path))
        if len(found) > self.model.vocabulary:
            raise ValueError(
                f"the text has {len(found)} tokens, and the model "
                f"{self.model.vocabulary}: set --task.model.vocabulary"
            )
        return found
