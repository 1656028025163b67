"""Beam search: the likeliest sentences of a model of the next token.

Shapes: B sentences, R beams of each, V vocabulary, L longest sentence in tokens;
N = B R, sentence by sentence.

Sources: Wu et al. (2016), arXiv:1609.08144, section 7, for the length penalty; Vaswani
et al. (2017), arXiv:1706.03762, section 6.1, for its exponent and the longest length.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

AnyCache = TypeVar("AnyCache")

NextLogits = Callable[[jax.Array, jax.Array, AnyCache], tuple[jax.Array, AnyCache]]
"""(token_N, position, cache) -> (logits_NxV of the next token, cache)."""


class Sentences(NamedTuple):
    """R sentences for each of B, the best first."""

    tokens: jax.Array  # int32 [B, R, L], up to the end token, then zeros
    scores: jax.Array  # float32 [B, R], -inf for a sentence that was not found


class _State(NamedTuple):
    position: jax.Array  # int32 [], number of tokens of each running sentence
    running: Sentences  # scored by log p; -inf for a beam that does not run
    finished: Sentences
    cache: Any


class _Search(NamedTuple):
    next_logits: NextLogits
    first_token: int
    end_token: int
    max_lengths: jax.Array  # int32 [B]
    penalty: float


def beam_search(
    next_logits: NextLogits[AnyCache],
    cache: AnyCache,
    *,
    first_token: int,
    end_token: int,
    max_length_B: jax.Array,
    length: int,
    beams: int,
    penalty: float,
) -> Sentences:
    """Searches each sentence's likeliest continuations of `first_token`.

    Of all continuations of a sentence's running beams by one token, the R likeliest are
    kept. One that ends, by the end token or at the longest length, leaves the running
    beams, and the R best of those that have ended are kept, by

        score = log p / ((5 + n) / 6)^penalty,    n tokens, the end token counted.

    With one beam this is greedy decoding. A sentence is done when no beam runs, or when
    no beam can beat its R-th finished one: log p only falls, so the score of what a
    beam becomes is at most its log p over the penalty of the longest length. The search
    stops when all sentences are done. Sentences do not affect each other.

    Args:
      next_logits: next token's logits, as `Transformer.decode_next`; `position` counts
        from 0, where the token is `first_token`.
      cache: pytree of arrays with a leading dim of N, the R copies of a sentence
        adjacent (`jnp.repeat(memory, beams, axis=0)`).
      first_token: token at position 0, which is no part of the sentence.
      end_token: token that ends a sentence.
      max_length_B: largest number of tokens of each sentence, at least 1; the paper's
        is 50 more than the source's.
      length: L, at least every `max_length_B`, and at most what the cache holds.
      beams: R.
      penalty: exponent of the length penalty; a larger one prefers longer sentences.
    """
    search = _Search(next_logits, first_token, end_token, max_length_B, penalty)
    num_sentences = max_length_B.shape[0]
    none = Sentences(
        jnp.zeros((num_sentences, beams, length), jnp.int32),
        jnp.full((num_sentences, beams), -jnp.inf, jnp.float32),
    )
    # Only the first beam runs at first, as all of them would find the same sentences.
    one = none._replace(scores=none.scores.at[:, 0].set(0.0))
    start = _State(jnp.asarray(0, jnp.int32), one, none, cache)
    return jax.lax.while_loop(
        functools.partial(_is_unfinished, search),
        functools.partial(_step, search),
        start,
    ).finished


def _is_unfinished(search: _Search, state: _State) -> jax.Array:
    hope_B = state.running.scores.max(axis=1) / _penalty(search, search.max_lengths)
    return (hope_B > state.finished.scores.min(axis=1)).any()


def _step(search: _Search, state: _State) -> _State:
    position, tokens_BxRxL = state.position, state.running.tokens
    num_sentences, beams, _ = tokens_BxRxL.shape
    last_BxR = tokens_BxRxL[:, :, position - 1]
    last_BxR = jnp.where(position == 0, search.first_token, last_BxR)
    logits_NxV, cache = search.next_logits(last_BxR.reshape(-1), position, state.cache)
    longer, parent_BxR = _extend(state.running, logits_NxV, position)
    # Beam r of sentence b is row b R + r of the cache.
    parent_N = (parent_BxR + beams * jnp.arange(num_sentences)[:, None]).reshape(-1)
    ends_BxR = longer.tokens[:, :, position] == search.end_token
    ends_BxR |= (position + 1 >= search.max_lengths)[:, None]
    ended = _only(longer, ends_BxR)
    ended = ended._replace(scores=ended.scores / _penalty(search, position + 1))
    return _State(
        position + 1,
        _only(longer, ~ends_BxR),
        _best(state.finished, ended),
        jax.tree.map(lambda leaf: leaf[parent_N], cache),
    )


def _penalty(search: _Search, num_tokens: jax.Array) -> jax.Array:
    return ((5.0 + num_tokens) / 6.0) ** search.penalty


def _extend(
    running: Sentences, logits_NxV: jax.Array, position: jax.Array
) -> tuple[Sentences, jax.Array]:
    """The R likeliest sentences of one token more, and the beams [B, R] they extend."""
    (num_sentences, beams), vocabulary = running.scores.shape, logits_NxV.shape[1]
    log_p = jax.nn.log_softmax(logits_NxV.astype(jnp.float32))
    total = running.scores[:, :, None] + log_p.reshape(num_sentences, beams, -1)
    # Continuation r V + v adds token v to beam r.
    scores_BxR, chosen_BxR = jax.lax.top_k(total.reshape(num_sentences, -1), beams)
    parent_BxR, token_BxR = chosen_BxR // vocabulary, chosen_BxR % vocabulary
    tokens_BxRxL = _take(running.tokens, parent_BxR).at[:, :, position].set(token_BxR)
    return Sentences(tokens_BxRxL, scores_BxR), parent_BxR


def _only(sentences: Sentences, chosen_BxR: jax.Array) -> Sentences:
    """The chosen sentences; the places of the others are empty."""
    return Sentences(
        jnp.where(chosen_BxR[:, :, None], sentences.tokens, 0),
        jnp.where(chosen_BxR, sentences.scores, -jnp.inf),
    )


def _best(some: Sentences, others: Sentences) -> Sentences:
    """The R best sentences of both."""
    tokens, scores = (
        jnp.concatenate(pair, axis=1) for pair in zip(some, others, strict=True)
    )
    scores_BxR, place_BxR = jax.lax.top_k(scores, some.scores.shape[1])
    return Sentences(_take(tokens, place_BxR), scores_BxR)


def _take(tokens_BxPxL: jax.Array, place_BxR: jax.Array) -> jax.Array:
    return jnp.take_along_axis(tokens_BxPxL, place_BxR[:, :, None], axis=1)
