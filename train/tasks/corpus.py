"""Translation of a corpus in a folder: WMT14's news, or anybody's own pairs."""

import dataclasses
from pathlib import Path

from train.data.pairs import read_corpus
from train.fields import checked
from train.models.transformer import TransformerConfig
from train.tasks.task import Task
from train.tasks.translation import DecodingConfig, translation


@checked
class TranslationTask:
    """Translation of a corpus that `python -m train.prepare` has made.

    Args:
      data: folder of the corpus.
      model: sizes of the Transformer.
      decoding: how translations are searched for.
      label_smoothing: share of the target that all tokens have alike.
      num_shapes: of batches, at the most; each is compiled once per exchange.
    """

    data: str
    model: TransformerConfig
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)
    label_smoothing: float = 0.1
    num_shapes: int = 32

    def build(self) -> Task:
        return translation(
            lambda: read_corpus(Path(self.data), self.model.vocabulary),
            self.model,
            self.decoding,
            self.label_smoothing,
            self.num_shapes,
        )
