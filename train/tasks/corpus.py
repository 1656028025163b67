"""Translation of a prepared corpus: WMT14's news, or sentence pairs of your own."""

import dataclasses
from pathlib import Path

from train.data.pairs import read_corpus
from train.fields import checked
from train.models.transformer import TransformerConfig
from train.tasks.task import Task
from train.tasks.translation import DecodingConfig, translation


@checked
class TranslationTask:
    """Translation of a corpus that `python -m train.prepare` has prepared.

    Args:
      data: folder of the corpus.
      model: sizes of the Transformer.
      decoding: options of the beam search.
      label_smoothing: share of the target that is spread evenly over all tokens.
      num_shapes: largest number of batch shapes; each is compiled once per exchange.
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
