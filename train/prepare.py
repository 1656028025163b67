"""Prepares data for training: `decentjax prepare KIND ... --out FOLDER`.

Kinds are wmt14, pairs, text and imagenet.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import tyro

from train.cli.command import command
from train.cli.load import check_folder
from train.cli.read import from_options
from train.data.files import check_new, progress
from train.data.imagenet_files import prepare_imagenet
from train.data.pairs import Corpus, Lines, ParallelFiles, check_sizes, write_corpus
from train.data.token_files import prepare_text
from train.data.vocabulary import train_vocabulary
from train.data.wmt14 import Pair, Wmt14


def wmt14(
    *,
    out: Path,
    pair: Pair = "de-en",
    vocabulary: int = 37120,
    max_tokens: int = 156,
    data_dir: Path | None = None,
) -> None:
    """Downloads WMT14, English to German or French, and tokenizes it.

    Example: `decentjax prepare wmt14 --pair fr-en --out data/wmt14`.

    Args:
      out: new folder.
      pair: languages, as TFDS names them.
      vocabulary: largest number of tokens, learned on both languages of the training
        pairs.
      max_tokens: longest sentence, tokens; longer training pairs are left out.
      data_dir: folder of TFDS's data; by default TFDS's own default.
    """
    check_folder(out, data_dir)
    check_new(out)  # First: an error should not cost a download.
    splits = "train", "validation", "test"
    lines = {split: Wmt14(pair, split, data_dir) for split in splits}
    _tokenize(lines, out, vocabulary, max_tokens)


def pairs(
    *,
    out: Path,
    train: tuple[Path, Path],
    validation: tuple[Path, Path],
    test: tuple[Path, Path],
    vocabulary: int = 37120,
    max_tokens: int = 156,
) -> None:
    """Tokenizes your own text files, a sentence per line.

    Example: `decentjax prepare pairs --train a.en a.de --validation b.en b.de --test
    c.en c.de --out data/mine`.

    Args:
      out: new folder.
      train: two files, source and target, whose lines correspond.
      validation: two files for the held-out loss.
      test: two files for BLEU.
      vocabulary: largest number of tokens, learned on both training files.
      max_tokens: longest sentence, tokens; longer training pairs are left out.
    """
    check_folder(out, *train, *validation, *test)
    check_new(out)
    files = {"train": train, "validation": validation, "test": test}
    lines = {split: ParallelFiles(*two) for split, two in files.items()}
    _tokenize(lines, out, vocabulary, max_tokens)


def text(
    *,
    files: tyro.conf.Positional[tuple[Path, ...]],
    out: Path,
    vocabulary: int | None = None,
    tokenizer: Path | None = None,
    held_out_share: float = 0.005,
    text_field: str = "text",
    skip_unreadable: bool = False,
) -> None:
    """Tokenizes text files for a language model, into train.bin and val.bin.

    Example: `decentjax prepare text my_texts --out data/corpus`.

    Args:
      files: UTF-8 files, or folders of them; a file is one document, or several that
        <|endoftext|> separates; NAME.jsonl and NAME.ndjson have one in each line, under
        "text", NAME.json too, or an array. All may be packed: NAME.jsonl.zst, NAME.gz.
      out: new folder.
      vocabulary: largest number of tokens, learned on the files or of the tokenizer; by
        default one for each 400 bytes of text, from 512 to 50,257.
      tokenizer: JSON file of a tokenizer, such as GPT-2's, to use instead of learning.
      held_out_share: share of the documents that go to val.bin; of a few large ones
        the last part of each.
      text_field: name of the text in a line of JSON.
      skip_unreadable: prepares the rest where more than 5 % of the bytes are no text.
    """
    check_folder(out, tokenizer, *files)
    if not files:
        raise ValueError("give text files, or folders of them")
    if missing := [path for path in files if not path.exists()]:
        raise ValueError(f"there is no file or folder {missing[0]}")
    made = prepare_text(
        files, out, vocabulary, tokenizer, held_out_share, text_field, skip_unreadable
    )
    print(f"{out}")
    print(f"  documents        {made.documents:,}")
    print(f"  training tokens  {made.train_tokens:,}")
    print(f"  held-out tokens  {made.held_out_tokens:,}")
    print(f"  vocabulary       {made.vocabulary:,}")
    for sentence in made.left_out:
        print(f"  {sentence}")
    print(f"next: decentjax train text --task.data {out}")


def imagenet(*, archives: Path, out: Path | None = None) -> None:
    """Converts the archives of ImageNet-1K into files with random access.

    Example: `decentjax prepare imagenet --archives downloads`.

    Args:
      archives: folder with ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar.
      out: folder of TFDS's data sets; by default TFDS_DATA_DIR in the environment, or
        ~/tensorflow_datasets.
    """
    check_folder(archives, out)
    print(prepare_imagenet(archives, out))


@command()
def main(arguments: list[str]) -> None:
    kinds = {kind.__name__: kind for kind in (wmt14, pairs, text, imagenet)}
    from_options(
        kinds,
        read=tyro.extras.subcommand_cli_from_dict,
        prog="decentjax prepare",
        description="Prepares data for training.\n\n"
        "Example: `decentjax prepare text my_texts --out runs/corpus`.",
        args=arguments,
    )


def _tokenize(
    lines: Mapping[str, Lines], out: Path, vocabulary: int, max_tokens: int
) -> None:
    """Learns a vocabulary, and writes the corpus of the three splits."""
    check_sizes(vocabulary, max_tokens)  # Before hours of learning.
    shown: Iterable = progress(lines["train"], "learning a vocabulary")
    texts = (line.strip() for pair in shown for line in pair)
    tokenizer = train_vocabulary(texts, vocabulary)
    corpus = write_corpus(out, tokenizer, **lines, max_tokens=max_tokens)
    print(_describe(corpus, out))


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
    return "\n".join(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
