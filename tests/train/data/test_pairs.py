"""Sentence pairs: into tokens and back, into files, into batches by length."""

import collections
import itertools
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data import pairs as pairs_module
from train.data.by_length import choose_shapes, length_steps, length_validation
from train.data.files import new_folder
from train.data.number_words import SIGNS, read_numbers
from train.data.pairs import (
    Counts,
    Pairs,
    ParallelFiles,
    Ragged,
    make_corpus,
    ragged,
    read_corpus,
    write_corpus,
)
from train.data.vocabulary import Vocabulary, load_vocabulary, train_vocabulary
from train.data.wmt14 import Wmt14

FIRST = 3  # The tokens before are special.
WORKERS = [1, 2, 3, 5]
LINES = [
    "the cat sat on the mat",
    "die Katze saß auf der Matte",
    "ein <s> ist hier Text, </s> auch",
    "日本語と😀 und \u2028 dazwischen",
]
PAIRS = [
    ("the cat", "die Katze"),
    ("", "nichts"),
    ("nothing", "  "),
    ("a b c d e f g h i j k", "kurz"),
    ("short", "l m n o p q r s t u v"),
    ("the mat", "die Matte"),
    ("", "l m n o p q r s t u v"),
    ("q" * 8, "die Katze"),  # Of 8 tokens: as many as max_tokens = 9 allows.
    ("the cat", "q" * 9),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return train_vocabulary(LINES * 3, 300)


@pytest.mark.nightly
@given(line=st.text(max_size=30))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_line_comes_back(vocabulary, line):
    assert vocabulary.decode(vocabulary.encode([line])) == [line]


def test_names_of_special_tokens_have_no_meaning_in_a_text(vocabulary):
    for line in [*LINES, "<s>", "</s></s>", "a<pad>b"]:
        [row] = vocabulary.encode([line])
        assert min(row) >= FIRST
        assert vocabulary.decode([[1, *row, 2, 0, 0]]) == [line]


def test_the_same_lines_give_the_same_vocabulary(vocabulary, tmp_path):
    again = train_vocabulary(iter(LINES * 3), 300)
    for number, bpe in enumerate([vocabulary, again]):
        bpe.save(tmp_path / f"{number}.json")
    texts = {path.read_text() for path in tmp_path.iterdir()}
    assert len(texts) == 1
    path = tmp_path / "0.json"
    path.write_text(texts.pop(), encoding="utf-8-sig")  # With a byte order mark.
    loaded = load_vocabulary(path)
    assert loaded.encode([*LINES, "<s>"]) == vocabulary.encode([*LINES, "<s>"])


def test_a_vocabulary_has_at_most_the_wanted_size(vocabulary):
    assert len(train_vocabulary(LINES * 3, 270)) == 270
    assert len(train_vocabulary(["a"], 270)) == 259
    with pytest.raises(ValueError, match="at least 259 tokens, got 258"):
        train_vocabulary(LINES, 258)
    assert [vocabulary.special(name) for name in ("<pad>", "<s>", "</s>")] == [0, 1, 2]
    with pytest.raises(ValueError, match="no token <mask>"):
        vocabulary.special("<mask>")


def test_a_vocabulary_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no vocabulary"):
        load_vocabulary(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"version": "1.0", "trunc')
    with pytest.raises(ValueError, match=r"half\.json is not the JSON file of a tok"):
        load_vocabulary(tmp_path / "half.json")


def rows(side) -> list[list[int]]:
    return [side[row].tolist() for row in range(len(side))]


@pytest.mark.parametrize("pairs_at_once", [2, 1000])
def test_files_hold_the_same_corpus(vocabulary, tmp_path, monkeypatch, pairs_at_once):
    monkeypatch.setattr(pairs_module, "PAIRS_AT_ONCE", pairs_at_once)
    splits = {"train": PAIRS * 2, "validation": PAIRS[:5], "test": PAIRS[3:]}
    made = make_corpus(vocabulary, **splits, max_tokens=9)
    written = write_corpus(tmp_path / "a" / "b", vocabulary, **splits, max_tokens=9)
    for corpus in (made, written, read_corpus(tmp_path / "a" / "b")):
        assert corpus.test_lines == PAIRS[3:]
        assert corpus.max_tokens == 9
        for split, lines in splits.items():
            expected: list[list[list[int]]] = [[], []]
            counts = collections.Counter()
            for pair in lines:
                sides = [vocabulary.encode([line.strip()])[0] for line in pair]
                empty = any(len(side) == 0 for side in sides)
                too_long = any(len(side) > 8 for side in sides)
                counts.update(empty=int(empty), too_long=int(too_long))
                if split == "train" and (empty or too_long):
                    continue
                counts.update(pairs=1)
                for column, side in zip(expected, sides, strict=True):
                    column.append(side[:8])
            assert counts["too_long"] > 0
            assert corpus.counts[split] == Counts(**counts)
            pairs = getattr(corpus, split)
            assert [rows(pairs.source), rows(pairs.target)] == expected
            assert pairs.source.tokens.dtype == np.uint16
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_pairs_in_files_go_to_other_processes_by_name(vocabulary, tmp_path):
    lines = [("the cat sat on the mat", "die Katze saß auf der Matte")] * 2000
    corpus = write_corpus(
        tmp_path / "x", vocabulary, train=lines, validation=lines[:1], test=[]
    )
    packed = pickle.dumps(corpus.train)
    assert len(packed) < 2000
    opened = pickle.loads(packed)
    np.testing.assert_array_equal(opened.target.tokens, corpus.train.target.tokens)
    part = corpus.train.source.tokens[3:9]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)), part)
    assert len(corpus.test) == 0


def test_an_interrupted_preparation_leaves_nothing(vocabulary, tmp_path):
    def lines():
        yield PAIRS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(
            tmp_path / "x", vocabulary, train=lines(), validation=PAIRS, test=PAIRS
        )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_takes_its_name_when_all_is_written(tmp_path):
    (tmp_path / "x").mkdir()  # Empty, so nothing is lost.
    with new_folder(tmp_path / "x") as unfinished:
        (unfinished / "file").write_text("all")
        assert not (tmp_path / "x" / "file").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "file").read_text() == "all"
    with (
        pytest.raises(FileExistsError, match="already exists"),
        new_folder(tmp_path / "x"),
    ):
        pass


def test_a_corpus_without_pairs_to_train_on_is_refused(vocabulary, tmp_path):
    splits = {"train": PAIRS[1:5], "validation": PAIRS, "test": PAIRS}
    message = "no pair is left to train on: 2 are empty, 2 too long"
    with pytest.raises(ValueError, match=message):
        write_corpus(tmp_path / "x", vocabulary, **splits, max_tokens=9)
    with pytest.raises(ValueError, match=message):
        make_corpus(vocabulary, **splits, max_tokens=9)
    with pytest.raises(ValueError, match="no pair is left"):
        make_corpus(vocabulary, train=[], validation=[], test=[])
    with pytest.raises(ValueError, match="at least 2, a token and </s>, got 1"):
        make_corpus(vocabulary, **splits, max_tokens=1)


def test_a_corpus_that_is_missing_or_broken_is_named(vocabulary, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"decentjax prepare wmt14"):
        read_corpus(tmp_path / "x")
    splits = {"train": PAIRS, "validation": PAIRS, "test": PAIRS}
    write_corpus(tmp_path / "x", vocabulary, **splits)
    tokens = tmp_path / "x" / "train.target.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="it was cut off"):
        read_corpus(tmp_path / "x")
    tokens.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match="do not belong together"):
        read_corpus(tmp_path / "x")
    (tmp_path / "x" / "corpus.json").write_text("{")
    with pytest.raises(ValueError, match=r"corpus\.json is broken"):
        read_corpus(tmp_path / "x")


def test_two_files_are_read_side_by_side(tmp_path):
    source, target = tmp_path / "s", tmp_path / "t"
    source.write_bytes("a\u2028b\r\n\nc ".encode())
    target.write_bytes("ä\nö\nü\n".encode())
    files = ParallelFiles(source, target)
    assert list(files) == list(files) == [("a\u2028b", "ä"), ("", "ö"), ("c ", "ü")]
    target.write_bytes(b"one\ntwo\n")
    with pytest.raises(ValueError, match=r"has 3 lines and .* has 2"):
        ParallelFiles(source, target)
    target.write_bytes(b"one\n\xff\nthree\n")
    with pytest.raises(ValueError, match="line 2"):
        list(ParallelFiles(source, target))


def numbered(lengths) -> Pairs:
    """Pair i is token FIRST + i, again and again, on both sides."""
    source, target = zip(*lengths, strict=True)
    return Pairs(
        *(
            ragged([[FIRST + i] * length for i, length in enumerate(side)])
            for side in (source, target)
        )
    )


def lengths_like_wmt(count: int, seed: int = 0) -> np.ndarray:
    """Log-normal source lengths of mean 27, targets 1.05 +- 0.2 times as long."""
    random = np.random.default_rng(seed)
    source = random.lognormal(np.log(27) - 0.6**2 / 2, 0.6, 2 * count)
    both = np.stack([source, source * random.normal(1.05, 0.2, 2 * count)], 1).round()
    return both[((both >= 1) & (both < 156)).all(1)][:count].astype(int)


LENGTHS = lengths_like_wmt(700).tolist()
OPTIONS = {"tokens_per_worker": 320, "num_shapes": 5}


def passes(pairs, num_workers, number=0, seed=0, workers=None):
    """The batches of one pass."""
    num = int(choose_shapes(pairs, num_workers, **OPTIONS).steps.sum())
    steps = length_steps(pairs, num_workers, seed=seed, workers=workers, **OPTIONS)
    return [steps[t].arrays for t in range(number * num, (number + 1) * num)]


def numbers_of(batch) -> list[list[int]]:
    """The pairs of each worker, checked token by token."""
    of_workers = []
    for sources, targets in zip(batch["source"], batch["target"], strict=True):
        of_workers.append([])
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            pair = source[0] - FIRST
            num_source, num_target = LENGTHS[pair]
            words = [FIRST + pair]
            padding = [0] * (len(source) - num_source - 1)
            assert source == words * num_source + [2] + padding
            padding = [0] * (len(target) - num_target - 2)
            assert target == [1] + words * num_target + [2] + padding
            of_workers[-1].append(pair)
    return of_workers


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("number", [0, 3])
def test_each_pass_gives_every_pair(num_workers, number):
    pairs = numbered(LENGTHS)
    seen: collections.Counter[int] = collections.Counter()
    batches = passes(pairs, num_workers, number)
    for batch in batches:
        of_workers = numbers_of(batch)
        assert len(of_workers) == num_workers
        seen.update(itertools.chain(*of_workers))
    assert set(seen) == set(range(len(LENGTHS)))


@pytest.mark.parametrize("num_workers", WORKERS)
def test_no_two_workers_see_a_pair_but_to_fill_the_last_step(num_workers):
    shapes = collections.defaultdict(list)
    for batch in passes(numbered(LENGTHS), num_workers):
        key = (batch["source"].shape, batch["target"].shape)
        shapes[key] += itertools.chain(*numbers_of(batch))
    assert len(shapes) <= 5
    ordered = sorted(shapes, key=lambda key: key[0][2] + key[1][2])
    for key in ordered[:-1]:
        assert len(shapes[key]) == len(set(shapes[key]))
    last = shapes[ordered[-1]]
    assert len(last) - len(set(last)) < num_workers * ordered[-1][0][1]
    for (workers, num_rows, width), (_, _, other) in shapes:
        assert workers == num_workers
        assert num_rows == 320 // max(width, other - 1)


def test_a_worker_gets_the_same_whoever_asks():
    pairs = numbered(LENGTHS)
    every = passes(pairs, 5)
    some = passes(pairs, 5, workers=[3, 1])
    for both, own in zip(every, some, strict=True):
        for side in both:
            np.testing.assert_array_equal(both[side][[3, 1]], own[side])


def test_seeds_share_the_order_of_shapes_and_nothing_else():
    pairs = numbered(LENGTHS)
    orders = set()
    for number in (0, 1):
        one, other = (passes(pairs, 3, number, seed) for seed in (0, 1))
        order = tuple(batch["source"].shape for batch in one)
        assert order == tuple(batch["source"].shape for batch in other)
        same = [
            np.array_equal(a["source"], b["source"])
            for a, b in zip(one, other, strict=True)
        ]
        assert not any(same)
        orders.add(order)
    assert len(orders) == 2


def test_each_pass_shuffles_the_pairs_anew():
    pairs = numbered(LENGTHS)
    dealt = []
    for number in (0, 1):
        shapes = collections.defaultdict(list)
        for batch in passes(pairs, 1, number):
            shapes[batch["source"].shape] += numbers_of(batch)[0]
        dealt.append(shapes)
    assert dealt[0].keys() == dealt[1].keys()
    assert all(dealt[0][shape] != dealt[1][shape] for shape in dealt[0])


def equal(one, other) -> bool:
    return all(
        np.array_equal(one.arrays[side], other.arrays[side])
        for side in ["source", "target"]
    )


def test_any_step_is_there_at_any_time_in_any_process():
    steps = length_steps(numbered(LENGTHS), 3, seed=7, **OPTIONS)
    first = {t: steps[t] for t in reversed(range(60))}  # From a later pass back.
    copy = pickle.loads(pickle.dumps(steps))
    for t in range(60):
        assert equal(first[t], steps[t])
        assert equal(first[t], copy[t])


def test_two_boxes_are_the_best_two():
    random = np.random.default_rng(0)
    # Sentences of more than half the tokens: a row for each step, nothing to fill up.
    lengths = random.integers(10, 19, (60, 2))
    widths = lengths + 1
    longest = widths.max(0)
    best = min(
        sum(s + t if (width <= (s, t)).all() else longest.sum() for width in widths)
        for s, t in itertools.product(range(11, 20), repeat=2)
    )
    shapes = choose_shapes(numbered(lengths.tolist()), 1, 19, num_shapes=2)
    assert shapes.efficiency == pytest.approx(widths.sum() / best)
    more = [
        choose_shapes(numbered(lengths.tolist()), 1, 19, k).efficiency
        for k in (1, 2, 3, 8)
    ]
    assert more == sorted(more)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_efficiency_is_the_share_of_tokens_that_count(num_workers):
    pairs = numbered(LENGTHS)
    real = sum(source + target + 2 for source, target in LENGTHS)
    in_all = sum(
        batch["source"].size + batch["target"][:, :, 1:].size
        for batch in passes(pairs, num_workers)
    )
    shapes = choose_shapes(pairs, num_workers, **OPTIONS)
    assert shapes.efficiency == pytest.approx(real / in_all)


def test_nine_tokens_of_ten_are_none_of_padding():
    lengths = lengths_like_wmt(200_000)
    source, target = (
        Ragged(np.zeros(side.sum(), np.uint16), np.r_[0, np.cumsum(side)])
        for side in lengths.T
    )
    pairs = Pairs(source, target)
    few, many = (choose_shapes(pairs, 4, 1560, k) for k in (16, 32))
    assert len(few.boxes) <= 16
    assert few.efficiency > 0.86
    assert many.efficiency > 0.9


def test_rows_are_a_multiple_of_what_is_asked_for():
    pairs = numbered(LENGTHS)
    longest = max(map(max, LENGTHS)) + 1
    steps = length_steps(pairs, 2, 4 * longest, 0, num_shapes=4, multiple_of=4)
    assert all(steps[t].arrays["source"].shape[1] % 4 == 0 for t in range(30))
    message = f"tokens_per_worker = {4 * longest - 1} .* 4 time.* {longest} tokens"
    with pytest.raises(ValueError, match=message):
        length_steps(pairs, 2, 4 * longest - 1, 0, multiple_of=4)
    with pytest.raises(ValueError, match=f"= {longest - 1} .* {longest} tokens"):
        length_steps(pairs, 2, longest - 1, 0)
    with pytest.raises(ValueError, match="at least 1, got 0, 16 and 1"):
        length_steps(pairs, 0, longest, 0)
    with pytest.raises(ValueError, match="no pairs"):
        length_steps(Pairs(ragged([]), ragged([])), 1, 10, 0)


def test_what_fills_no_step_goes_to_a_box_that_holds_it():
    lengths = [(20, 5)] * 7 + [(5, 20)] * 7 + [(20, 20)]
    options = {"tokens_per_worker": 63, "num_shapes": 3}
    num = choose_shapes(numbered(lengths), 2, **options).steps
    assert num.tolist() == [1, 1, 1]
    steps = length_steps(numbered(lengths), 2, seed=0, **options)
    batches = [steps[t].arrays for t in range(3)]
    seen = {int(i) for batch in batches for i in batch["source"][:, :, 0].flat}
    assert seen == {FIRST + i for i in range(len(lengths))}
    more = numbered([(20, 5)] * 10 + [(5, 20)] * 10 + [(20, 20)])
    assert choose_shapes(more, 2, **options).steps.tolist() == [1, 1, 2]


def test_few_pairs_are_repeated_to_fill_a_step():
    steps = length_steps(numbered([(3, 4), (5, 2)]), 5, 20, 0, num_shapes=16)
    batch = steps[0].arrays
    assert batch["source"].shape == (5, 3, 6)
    assert set(batch["source"][:, :, 0].ravel().tolist()) == {FIRST, FIRST + 1}


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_validation_holds_each_pair_once(num_rows):
    batches = length_validation(numbered(LENGTHS), num_rows, num_shapes=3)
    seen = []
    for batch in batches:
        assert len(batch["source"]) == len(batch["target"]) == num_rows
        real = batch["source"][:, 0] > 0
        assert not batch["source"][~real].any()
        assert not batch["target"][~real].any()
        one_worker = {side: array[real][None] for side, array in batch.items()}
        seen += itertools.chain(*numbers_of(one_worker))
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert len({batch["source"].shape for batch in batches}) <= 3


def test_numbers_are_said_in_german_and_held_out_ones_are_new():
    corpus = read_numbers(700, 40, 30, vocabulary=300, seed=3)
    assert [corpus.counts[split].pairs for split in corpus.counts] == [700, 40, 30]
    assert len(corpus.vocabulary) == 300
    said = []
    for split in ("train", "validation", "test"):
        pairs = getattr(corpus, split)
        sides = [
            corpus.vocabulary.decode(rows(s)) for s in (pairs.source, pairs.target)
        ]
        said += zip(*sides, strict=True)
    assert said[-30:] == corpus.test_lines
    words = re.compile("|".join(f" {en} " for en, _ in SIGNS))
    signs = dict(SIGNS)
    numbers = {}
    for source, target in said:
        parts = words.split(source)
        between = [signs[word.strip()] for word in words.findall(source)]
        said_in_german = target.split()
        assert said_in_german[1::2] == between
        numbers |= zip(parts, said_in_german[::2], strict=True)
    assert numbers["twenty-one"] == "einundzwanzig"
    of_part = [
        {number for source, _ in part for number in words.split(source)}
        for part in (said[:700], said[700:740], said[740:])
    ]
    assert len(of_part[0]) > 600
    assert len(set.union(*of_part)) == sum(map(len, of_part))
    assert max(map(len, of_part[1:])) <= 100
    assert corpus.test_lines == read_numbers(700, 40, 30, 300, seed=3).test_lines
    assert corpus.test_lines != read_numbers(700, 40, 30, 300, seed=4).test_lines


def test_wmt14_comes_from_tfds_english_first():
    tfds = pytest.importorskip("tensorflow_datasets")
    with tfds.testing.mock_data(num_examples=4):
        import tensorflow_datasets.translate.wmt14  # noqa: F401

        lines = Wmt14("fr-en", "validation")
        source = tfds.data_source("wmt14_translate/fr-en", split="validation")
        assert len(lines) == 4
        expected = [(source[i]["en"], source[i]["fr"]) for i in range(4)]
        assert list(lines) == list(lines) == expected


def test_wmt14_that_is_unavailable_is_one_sentence(monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")

    def no_network(*args, **options):
        raise ModuleNotFoundError("No module named 'importlib_resources'")

    monkeypatch.setattr(tfds, "data_source", no_network)
    with pytest.raises(FileNotFoundError, match=r"WMT14 de-en .*importlib_res"):
        Wmt14("de-en", "train")
