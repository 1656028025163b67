"""How tokens are drawn, against the distribution in float64 NumPy, and spelled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from train.tasks.language import Bytes
from train.tasks.sampling import Sampling, draw, spelled

# The last two are of tokens that no text has.
LOGITS = np.array([0.3, -1.2, 2.0, 0.9, -0.4, 8.0, 9.0], np.float32)
KNOWN, NUM_DRAWS = 5, 20_000


@functools.partial(jax.jit, static_argnums=(2, 3))
def drawn(logits, keys, known, sampling):
    return jax.vmap(lambda key: draw(logits, key, known, sampling))(keys)


def counts(logits, known=KNOWN, **options):
    """How often each token is drawn."""
    keys = jax.random.split(jax.random.key(7), NUM_DRAWS)
    tokens = drawn(jnp.asarray(logits), keys, known, Sampling(**options))
    return np.bincount(np.asarray(tokens), minlength=len(logits))


@pytest.mark.slow
@pytest.mark.draw(6)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 5, 100])
def test_tokens_have_the_chances_of_the_softmax(temperature, top_k):
    kept = sorted(range(KNOWN), key=lambda v: -LOGITS[v])[: top_k or KNOWN]
    weights = np.exp(LOGITS[kept].astype(np.float64) / temperature)
    wanted = weights / weights.sum() * NUM_DRAWS
    found = counts(LOGITS, temperature=temperature, top_k=top_k)
    assert found[kept].sum() == NUM_DRAWS
    if len(kept) > 1:
        assert chisquare(found[kept], wanted).pvalue > 0.01


def test_of_equal_logits_no_more_than_k_are_drawn():
    found = counts(np.zeros(7, np.float32), known=7, top_k=3)
    assert np.flatnonzero(found).tolist() == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-45])
def test_cold_draws_are_the_likeliest_token(temperature):
    for logits in (LOGITS, LOGITS - 20):
        assert counts(logits, temperature=temperature)[2] == NUM_DRAWS


def test_a_temperature_of_any_size_is_a_number():
    found = counts(LOGITS, temperature=1e30)
    assert chisquare(found[:KNOWN]).pvalue > 0.01


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, r"temperature must be at least 0, got -0\.1"),
        ({"temperature": float("nan")}, "temperature must be a number that float32"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_options_that_mean_nothing_get_a_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options)


def pieces_of(row):
    texts = (row[:length] for length in range(len(row) + 1))
    return list(spelled(Bytes().decode, texts))


def test_characters_are_shown_once_they_are_whole():
    pieces = pieces_of("aé€😀".encode())
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀"]


def test_a_space_at_the_start_of_a_token_stays():
    """Though decoders leave out that of the first token."""

    def decode(rows):
        return ["".join(row).removeprefix(" ") for row in rows]

    texts = [[], ["Once"], ["Once", " upon"], ["Once", " upon", " a"]]
    assert list(spelled(decode, texts)) == ["", "Once", " upon", " a", ""]


@given(st.binary(max_size=20))
def test_the_pieces_are_the_text(row):
    assert "".join(pieces_of(row)) == row.decode(errors="replace")
