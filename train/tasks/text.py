"""Language modelling of token files, in nanoGPT's layout: OpenWebText."""

from pathlib import Path

import numpy as np

from train.data.token_files import Tokens, check_tokens, read_tokens
from train.data.vocabulary import load_vocabulary
from train.fields import checked
from train.tasks.language import TextOptions, text_task
from train.tasks.task import Task


@checked
class TextTask(TextOptions):
    """A GPT on the tokens of `train.bin` and `val.bin`.

    Args:
      data: folder of the two, and of vocabulary.json where text is generated.
    """

    data: str
    num_eval_windows: int = 2048
    eval_rows: int = 16

    def build(self) -> Task:
        folder = Path(self.data)

        def read() -> Tokens:
            check_tokens(folder, self.model.vocabulary)
            return read_tokens(folder)

        return text_task(
            read,
            self,
            dtype=np.uint16,
            score="loss",
            vocabulary=lambda: load_vocabulary(folder / "vocabulary.json"),
        )
