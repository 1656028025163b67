"""Language modelling of one's own text, or of token files in nanoGPT's layout."""

import dataclasses
from pathlib import Path
from typing import Literal, Self

import jax.numpy as jnp
import numpy as np

from train.data.token_files import (
    Tokens,
    check_tokens,
    is_prepared,
    read_text_files,
    read_tokens,
)
from train.data.vocabulary import Bytes, load_vocabulary, vocabulary_size
from train.fields import checked
from train.tasks.language import TextOptions, text_task
from train.tasks.task import Task


@checked
class TextTask(TextOptions):
    """A GPT on the tokens of `train.bin` and `val.bin`, or on the bytes of text files.

    The model knows as many tokens as its vocabulary says, and at least those of the
    data.

    Args:
      data: folder of the two, which `decentjax prepare text` has written; or text: a
        file, a folder of files, or NAME.jsonl with a "text" in each line, packed by
        gzip or zstd or not. Its bytes are the tokens then.
      tokens: whether they are the bytes of text, or those of such a folder; "auto"
        looks, and a run keeps what it has found.
      held_out_share: share of the documents that is held out of text.
      text_field: name of the text in a line of JSON.
      skip_unreadable: trains on the rest where more than 5 % of the bytes are no text.
    """

    data: str
    tokens: Literal["auto", "bytes", "prepared"] = "auto"
    held_out_share: float = 0.05
    text_field: str = "text"
    skip_unreadable: bool = False
    num_eval_windows: int = 2048
    eval_rows: int = 16

    def build(self) -> Task:
        path, options = Path(self.data), self.resolved()
        if options.tokens == "bytes":
            return options._of_bytes(path)
        vocabulary = path / "vocabulary.json"

        def read() -> Tokens:
            check_tokens(path, options.model.vocabulary)
            return read_tokens(path)

        return text_task(
            read,
            options,
            dtype=np.uint16,
            score="loss",
            vocabulary=lambda: load_vocabulary(vocabulary),
        )

    def resolved(self) -> Self:
        """The task with what its data decides: tokens, and the model's vocabulary."""
        path, tokens = Path(self.data), self.tokens
        if tokens == "auto":
            tokens = "prepared" if is_prepared(path) else "bytes"
        count = len(Bytes())
        if tokens == "prepared":
            count = vocabulary_size(path / "vocabulary.json")
        return dataclasses.replace(self.knowing(count), tokens=tokens)

    def _of_bytes(self, path: Path) -> Task:
        return text_task(
            lambda: read_text_files(
                path, self.held_out_share, self.text_field, self.skip_unreadable
            ),
            self,
            dtype=np.uint8,
            score="bits_per_byte",
            unit=lambda nats: nats / jnp.log(2),
            vocabulary=Bytes,
        )
