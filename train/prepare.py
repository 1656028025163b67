"""Prepares data for training: `python -m train.prepare KIND ... --out FOLDER`.

Kinds are wmt14, pairs, text and imagenet.
"""

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

import tyro

from train.cli.command import command
from train.cli.load import check_folder
from train.data.by_length import choose_shapes
from train.data.files import check_new, progress
from train.data.imagenet_files import prepare_imagenet
from train.data.pairs import Corpus, Lines, ParallelFiles, write_corpus
from train.data.token_files import prepare_text
from train.data.vocabulary import train_vocabulary
from train.data.wmt14 import Pair, Wmt14
from train.tasks.corpus import TranslationTask

# The paper's batches: 25,000 tokens on 16 workers.
WORKERS = 16
TOKENS_PER_WORKER = 25_000 // WORKERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareWmt14:
    """Downloads WMT14, English to German or French, and tokenizes it.

    Args:
      out: new folder.
      pair: languages, as TFDS names them.
      vocabulary: largest number of tokens, learned on both languages of the training
        pairs.
      max_tokens: longest sentence, tokens; longer training pairs are left out.
      data_dir: folder of TFDS's data; by default TFDS's own default.
    """

    out: Path
    pair: Pair = "de-en"
    vocabulary: int = 37120
    max_tokens: int = 156
    data_dir: Path | None = None

    def run(self) -> None:
        check_new(self.out)
        train, validation, test = (
            Wmt14(self.pair, split, self.data_dir)
            for split in ("train", "validation", "test")
        )
        _prepare(self, train, validation, test)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparePairs:
    """Tokenizes your own text files, a sentence per line.

    Args:
      out: new folder.
      train: two files, source and target, whose lines correspond.
      validation: two files for the held-out loss.
      test: two files for BLEU.
      vocabulary: largest number of tokens, learned on both training files.
      max_tokens: longest sentence, tokens; longer training pairs are left out.
    """

    out: Path
    train: tuple[Path, Path]
    validation: tuple[Path, Path]
    test: tuple[Path, Path]
    vocabulary: int = 37120
    max_tokens: int = 156

    def run(self) -> None:
        check_new(self.out)
        files = (self.train, self.validation, self.test)
        train, validation, test = (ParallelFiles(*pair) for pair in files)
        _prepare(self, train, validation, test)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareText:
    """Tokenizes text files for a language model, into train.bin and val.bin.

    Args:
      files: UTF-8 files, or folders of them; a file is one document, or several that
        <|endoftext|> separates.
      out: new folder.
      vocabulary: largest number of tokens, learned on the files or of the tokenizer.
      tokenizer: JSON file of a tokenizer, such as GPT-2's, to use instead of learning.
      held_out_share: share of the documents that go to val.bin.
    """

    files: tyro.conf.Positional[tuple[Path, ...]]
    out: Path
    vocabulary: int = 50257
    tokenizer: Path | None = None
    held_out_share: float = 0.005

    def run(self) -> None:
        if not self.files:
            raise ValueError("give text files, or folders of them")
        if missing := [path for path in self.files if not path.exists()]:
            raise ValueError(f"there is no file or folder {missing[0]}")
        made = prepare_text(
            self.files, self.out, self.vocabulary, self.tokenizer, self.held_out_share
        )
        print(f"{self.out}")
        print(f"  documents        {made.documents:,}")
        print(f"  training tokens  {made.train_tokens:,}")
        print(f"  held-out tokens  {made.held_out_tokens:,}")
        print(f"  vocabulary       {made.vocabulary:,}")
        if made.skipped:
            print(f"  skipped files    {len(made.skipped):,}")
        for path, reason in made.skipped.items():
            print(f"    {path}: {reason}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareImageNet:
    """Converts the archives of ImageNet-1K into files with random access.

    Args:
      archives: folder with ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar.
      out: folder of TFDS's data sets; by default TFDS_DATA_DIR in the environment, or
        ~/tensorflow_datasets.
    """

    archives: Path
    out: Path | None = None

    def run(self) -> None:
        print(prepare_imagenet(self.archives, self.out))


KINDS = {
    "wmt14": PrepareWmt14,
    "pairs": PreparePairs,
    "text": PrepareText,
    "imagenet": PrepareImageNet,
}


@command()
def main(arguments: list[str]) -> None:
    kind = tyro.extras.subcommand_cli_from_dict(
        KINDS, prog="python -m train.prepare", args=arguments
    )
    for path in vars(kind).values():
        if isinstance(path, Path):
            check_folder(path)
    kind.run()


def _prepare(
    to: PrepareWmt14 | PreparePairs, train: Lines, validation: Lines, test: Lines
) -> None:
    shown: Iterable = progress(train, "learning a vocabulary")
    lines = (line.strip() for pair in shown for line in pair)
    corpus = write_corpus(
        to.out,
        train_vocabulary(lines, to.vocabulary),
        train=train,
        validation=validation,
        test=test,
        max_tokens=to.max_tokens,
    )
    print(_describe(corpus, to.out))


def _describe(corpus: Corpus, out: Path) -> str:
    rows = [f"{out}", f"  vocabulary  {len(corpus.vocabulary):,}"]
    for split, counts in corpus.counts.items():
        pairs = getattr(corpus, split)
        left = "left out" if split == "train" else "cut or kept"
        rows.append(
            f"  {split:10}  {counts.pairs:,} pairs, {len(pairs.source.tokens):,} + "
            f"{len(pairs.target.tokens):,} tokens; {left}: {counts.too_long:,} too "
            f"long, {counts.empty:,} empty"
        )
    tokens = max(TOKENS_PER_WORKER, corpus.max_tokens)
    shapes = choose_shapes(corpus.train, WORKERS, tokens, TranslationTask.num_shapes)
    rows.append(
        f"  {shapes.steps.sum():,} steps a pass with {tokens:,} tokens on each of "
        f"{WORKERS} workers; {shapes.efficiency:.1%} of them are not padding"
    )
    return "\n".join(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
