"""Number words from English into German: a small version of WMT14's task."""

from train.data.number_words import read_numbers
from train.fields import checked
from train.tasks.task import Task
from train.tasks.translation import TranslationOptions, translation


@checked
class NumbersTask(TranslationOptions):
    """Translation of number words; no number of the test set is in the training set.

    "nine hundred and ninety-nine" is "neunhundertneunundneunzig": units come before
    tens, and words grow together.

    Args:
      num_train: number of training pairs.
    """

    num_train: int = 20_000
    num_shapes: int = 4  # Few lengths, so more shapes would save little padding.

    def build(self) -> Task:
        count, vocabulary = self.num_train, self.model.vocabulary
        return translation(lambda: read_numbers(count, vocabulary=vocabulary), self)
