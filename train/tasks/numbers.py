"""Translation of number words from English into German: WMT14's task in small."""

import dataclasses

from train.data.number_words import read_numbers
from train.fields import checked
from train.models.transformer import TransformerConfig
from train.tasks.task import Task
from train.tasks.translation import DecodingConfig, translation


@checked
class NumbersTask:
    """Translation of number words; no number of the test set is in the training set.

    "nine hundred and ninety-nine" is "neunhundertneunundneunzig": units come before
    tens, and words grow together.

    Args:
      model: sizes of the Transformer.
      num_train: number of training pairs.
      decoding: options of the beam search.
      label_smoothing: share of the target that is spread evenly over all tokens.
      num_shapes: largest number of batch shapes; each is compiled once per exchange.
    """

    model: TransformerConfig
    num_train: int = 20_000
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)
    label_smoothing: float = 0.1
    num_shapes: int = 4

    def build(self) -> Task:
        return translation(
            lambda: read_numbers(self.num_train, vocabulary=self.model.vocabulary),
            self.model,
            self.decoding,
            self.label_smoothing,
            self.num_shapes,
        )
