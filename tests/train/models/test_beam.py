"""Beam search, against searches in NumPy, and with the Transformer."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.numbered import numbered
from train.models.beam import Sentences, beam_search
from train.models.transformer import Transformer, TransformerConfig
from train.tasks.translation import DecodingConfig

FIRST, END, VOCABULARY, LENGTH = 1, 2, 3, 4


class History(NamedTuple):
    """The cache of a model whose next token hangs on all those before."""

    tables: jax.Array  # [N, L, 5, V], logits at each position and history
    history: jax.Array  # [N], a hash of the tokens so far


def next_logits(token_N, position, cache):
    history_N = (cache.history * 3 + token_N + 1) % 5
    logits_NxV = cache.tables[jnp.arange(token_N.size), position, history_N]
    return logits_NxV, cache._replace(history=history_N)


def tables(num_sentences: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(0, 2, (num_sentences, LENGTH, 5, vocabulary))


def search(tables, max_lengths, beams, penalty=0.6) -> Sentences:
    num_sentences = len(tables)
    cache = History(
        jnp.asarray(np.repeat(tables, beams, axis=0), jnp.float32),
        jnp.zeros(num_sentences * beams, jnp.int32),
    )
    run = functools.partial(
        beam_search,
        next_logits,
        first_token=FIRST,
        end_token=END,
        length=LENGTH,
        beams=beams,
        penalty=penalty,
    )
    return jax.jit(run)(cache, max_length_B=jnp.asarray(max_lengths))


def log_p(table: np.ndarray, tokens: tuple[int, ...]) -> float:
    total, history = 0.0, 0
    for position, (last, token) in enumerate(itertools.pairwise((FIRST, *tokens))):
        history = (history * 3 + last + 1) % 5
        logits = table[position, history]
        total += logits[token] - np.log(np.exp(logits).sum())
    return total


def ends(tokens: tuple[int, ...], max_length: int) -> bool:
    return len(tokens) == max_length or tokens[-1] == END


def score(table: np.ndarray, tokens: tuple[int, ...], penalty: float) -> float:
    return log_p(table, tokens) / ((5 + len(tokens)) / 6) ** penalty


def exhaustive(table, max_length, penalty) -> list[tuple[int, ...]]:
    """All sentences, best first."""
    found = [
        tokens
        for length in range(1, max_length + 1)
        for tokens in itertools.product(range(table.shape[-1]), repeat=length)
        if END not in tokens[:-1] and ends(tokens, max_length)
    ]
    return sorted(found, key=lambda tokens: -score(table, tokens, penalty))


def narrow(table, max_length, beams, penalty) -> list[tuple[int, ...]]:
    """The best of those that a search with few beams meets, to its very end."""
    running, finished = [()], []
    while running:
        ways = [(*tokens, i) for tokens in running for i in range(table.shape[-1])]
        kept = sorted(ways, key=lambda tokens: -log_p(table, tokens))[:beams]
        finished += [tokens for tokens in kept if ends(tokens, max_length)]
        running = [tokens for tokens in kept if not ends(tokens, max_length)]
    return sorted(finished, key=lambda tokens: -score(table, tokens, penalty))[:beams]


def assert_found(found: Sentences, expected, tables, penalty):
    """`expected` holds for each sentence its best ones, in order."""
    for b, sentences in enumerate(expected):
        scores = [score(tables[b], tokens, penalty) for tokens in sentences]
        padded = [tokens + (0,) * (LENGTH - len(tokens)) for tokens in sentences]
        num_found = int(np.isfinite(found.scores[b]).sum())
        assert num_found == len(sentences)
        np.testing.assert_array_equal(found.tokens[b, :num_found], padded)
        np.testing.assert_array_equal(found.tokens[b, num_found:], 0)
        np.testing.assert_allclose(found.scores[b, :num_found], scores, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_with_enough_beams_the_search_is_exhaustive(penalty):
    beams, max_lengths, some = 24, [4, 2, 1, 4, 3], tables(5)
    found = search(some, max_lengths, beams, penalty)
    expected = [
        exhaustive(table, length, penalty)[:beams]
        for table, length in zip(some, max_lengths, strict=True)
    ]
    assert [len(sentences) for sentences in expected] == [24, 7, 3, 24, 15]
    assert_found(found, expected, some, penalty)


@pytest.mark.draw(2)
@pytest.mark.parametrize("beams", [1, 2, 3])
@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_few_beams_keep_the_likeliest_ways_at_each_token(beams, penalty):
    some, max_lengths = tables(8, vocabulary=5), [4, 3] * 4
    found = search(some, max_lengths, beams, penalty)
    expected = [
        narrow(table, length, beams, penalty)
        for table, length in zip(some, max_lengths, strict=True)
    ]
    assert_found(found, expected, some, penalty)


def test_one_beam_is_greedy_decoding():
    some = tables(8, vocabulary=5)
    found = search(some, [LENGTH] * 8, beams=1)
    for table, tokens in zip(some, np.asarray(found.tokens[:, 0]), strict=True):
        greedy = ()
        while not greedy or not ends(greedy, LENGTH):
            ways = [(*greedy, i) for i in range(5)]
            greedy = max(ways, key=lambda way: log_p(table, way))
        assert tuple(tokens.tolist()) == greedy + (0,) * (LENGTH - len(greedy))


def test_the_penalty_prefers_longer_sentences():
    # Both sentences that end early are likelier than what the running beam is then.
    table = np.log(np.full((1, LENGTH, 5, VOCABULARY), [0.98, 0.01, 0.01]))
    table[:, 0] = np.log([0.5, 0.05, 0.45])
    table[:, 1] = np.log([0.54, 0.01, 0.45])
    for penalty, best, value in (
        (0.0, [END, 0, 0, 0], np.log(0.45)),
        (2.0, [0, 0, 0, 0], np.log(0.5 * 0.54 * 0.98**2) / 1.5**2),
    ):
        found = search(table, [LENGTH], 2, penalty)
        np.testing.assert_array_equal(found.tokens[0, 0], best)
        np.testing.assert_allclose(found.scores[0, 0], value, rtol=1e-5)


def test_no_sentence_changes_what_another_finds():
    some, max_lengths = tables(4), [4, 2, 3, 1]
    together = search(some, max_lengths, 3)
    for b in range(4):
        alone = search(some[b : b + 1], max_lengths[b : b + 1], 3)
        np.testing.assert_array_equal(together.tokens[b], alone.tokens[0])
        np.testing.assert_allclose(together.scores[b], alone.scores[0], rtol=1e-6)


def positions_visited(logits: list[list[float]], beams: int) -> list[int]:
    """Those of a search up to six tokens, with given logits at each."""
    visited = []

    def next_logits(token_N, position, cache):
        jax.debug.callback(lambda position: visited.append(int(position)), position)
        return jnp.asarray(logits)[position][None].repeat(token_N.size, 0), cache

    found = beam_search(
        next_logits,
        (),
        first_token=FIRST,
        end_token=END,
        max_length_B=jnp.array([6]),
        length=6,
        beams=beams,
        penalty=0.6,
    )
    jax.block_until_ready(found)
    jax.effects_barrier()
    return visited


def test_the_search_stops_when_no_beam_can_win():
    sure, unsure = [0.0, 0.0, 9.0], [1.0, 1.0, 1.0]
    assert positions_visited([sure] * 6, beams=1) == [0]
    assert positions_visited([sure] * 6, beams=2) == [0, 1]
    assert positions_visited([unsure] * 5 + [sure], beams=2) == [0, 1, 2, 3, 4, 5]


def small_transformer() -> Transformer:
    config = TransformerConfig(
        vocabulary=9, context=8, num_layers=1, num_heads=2, width=8, hidden=8
    )
    return numbered(lambda: Transformer(config, rngs=nnx.Rngs(0)))


@pytest.mark.slow
def test_scores_are_those_of_decoding_by_the_transformer():
    model, beams, max_lengths = small_transformer(), 3, np.array([6, 4])
    sources = jnp.repeat(jnp.array([[3, 4, 5, 6], [7, 8, 0, 0]]), beams, axis=0)

    def find(model):
        cache = model.start_cache(model.encode(sources), sources, length=6)
        return beam_search(
            model.decode_next,
            cache,
            first_token=FIRST,
            end_token=END,
            max_length_B=jnp.asarray(max_lengths),
            length=6,
            beams=beams,
            penalty=0.6,
        )

    tokens, scores = map(np.asarray, nnx.jit(find)(model))
    assert all(len(np.unique(some, axis=0)) == beams for some in tokens)
    tokens = tokens.reshape(-1, 6)
    targets = np.concatenate([np.full_like(tokens[:, :1], FIRST), tokens[:, :-1]], 1)
    logits = nnx.jit(Transformer.__call__)(model, sources, jnp.asarray(targets))
    log_p = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), tokens[:, :, None], 2
    )[:, :, 0]
    ended = (tokens == END).any(1)
    lengths = np.where(ended, (tokens == END).argmax(1) + 1, max_lengths.repeat(beams))
    total = [each[:length].sum() for each, length in zip(log_p, lengths, strict=True)]
    np.testing.assert_allclose(
        scores.reshape(-1), total / ((5 + lengths) / 6) ** 0.6, rtol=1e-4
    )


def test_impossible_options_are_refused():
    with pytest.raises(ValueError, match="beams must be positive, got 0"):
        DecodingConfig(beams=0)
    with pytest.raises(ValueError, match="length_penalty must not be negative, got -1"):
        DecodingConfig(length_penalty=-1)
