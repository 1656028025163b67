"""Language modelling of the text of a Hugging Face dataset."""

import functools
from pathlib import Path
from typing import Self

import jax.numpy as jnp
import numpy as np

from train.data.hub_datasets import read_splits, read_text
from train.data.token_files import Tokens
from train.data.vocabulary import (
    Bytes,
    Vocabulary,
    load_vocabulary,
    vocabulary_size,
)
from train.fields import checked
from train.tasks.language import TextOptions, text_task
from train.tasks.task import Task


@checked
class HubTextTask(TextOptions):
    """A GPT on a column of text, which is tokenized in memory at the start.

    For more text than that, `decentjax prepare text` writes the files of `TextTask`.
    The model knows as many tokens as its vocabulary says, and at least those of the
    tokenizer.

    Args:
      data: folder that `save_to_disk` has written, else a name on the hub.
      subset: name of one of several subsets on the hub.
      column: name of the column of text.
      tokenizer: JSON file of a tokenizer that has <|endoftext|>; None for bytes.
      held_out_share: share of the documents that is held out, where the dataset has no
        split for it.
    """

    data: str
    subset: str | None = None
    column: str = "text"
    tokenizer: str | None = None
    held_out_share: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.held_out_share < 1:
            raise ValueError(
                f"held_out_share must be in (0, 1), got {self.held_out_share}"
            )

    def build(self) -> Task:
        in_bytes = self.tokenizer is None
        vocabulary = functools.cache(self._vocabulary)

        def read() -> Tokens:
            if len(vocabulary()) > options.model.vocabulary:
                raise ValueError(
                    f"the text has {len(vocabulary())} tokens, and the model "
                    f"{options.model.vocabulary}: set --task.model.vocabulary"
                )
            splits = read_splits(self.data, self.subset, self.held_out_share)
            return read_text(splits, self.column, vocabulary())

        options = self.resolved()
        return text_task(
            read,
            options,
            dtype=np.int32,
            score="bits_per_byte" if in_bytes else "loss",
            unit=lambda nats: nats / jnp.log(2) if in_bytes else nats,
            vocabulary=vocabulary,
        )

    def resolved(self) -> Self:
        """The task with what its data decides."""
        path = self.tokenizer
        known = len(Bytes()) if path is None else vocabulary_size(Path(path))
        return self.knowing(known)

    def _vocabulary(self) -> Vocabulary | Bytes:
        path = self.tokenizer
        return Bytes() if path is None else load_vocabulary(Path(path))
