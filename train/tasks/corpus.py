"""Translation of a prepared corpus: WMT14's news, or other sentence pairs."""

from pathlib import Path

from train.data.pairs import read_corpus
from train.fields import checked
from train.tasks.task import Task
from train.tasks.translation import TranslationOptions, translation


@checked
class TranslationTask(TranslationOptions):
    """Translation of a corpus that `decentjax prepare` has prepared.

    Args:
      data: folder of the corpus.
    """

    data: str

    def build(self) -> Task:
        folder, vocabulary = Path(self.data), self.model.vocabulary
        return translation(lambda: read_corpus(folder, vocabulary), self)
