"""Language modelling against the model itself, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.changes import changed
from train.models.gpt import GPT, GPTConfig
from train.tasks.language import language_task, spread
from train.tasks.sampling import Sampling

CONFIG = GPTConfig(
    vocabulary=11, context=6, num_layers=1, num_heads=2, width=8, init_std=2.0
)


AS_CONFIGURED = Sampling()


class Numbers(int):
    """That many tokens, each its own text: " 7" is token 7."""

    __len__ = int.__int__

    def encode(self, lines):
        return [list(map(int, line.split())) for line in lines]

    def decode(self, rows):
        return ["".join(f" {token}" for token in row) for row in rows]

    def special(self, name):
        raise ValueError(f"no {name}")


class Ending(Numbers):
    """Token 8 is the end of a document."""

    def special(self, name):
        assert name == "<|endoftext|>"
        return 8


def task(known=9, length=40, config=CONFIG, kind=Numbers):
    return language_task(
        config,
        dtype=np.uint8,
        score="loss",
        vocabulary=lambda: kind(known),
        prompt="",
        length=length,
        steps=None,
        validation=None,
    )


def generated(params, text, sampling=AS_CONFIGURED, **options):
    """The tokens of a text and of its continuation."""
    (pieces,) = task(**options).generate(params, (), [text], sampling)
    return list(map(int, "".join(pieces).split()))


@pytest.fixture(scope="module")
def gpt_and_params():
    """A compiled GPT, a function of tokens, and the parameters that it has."""
    params, _ = jax.jit(task().init)(jax.random.key(0))
    gpt = nnx.eval_shape(lambda: GPT(CONFIG, rngs=nnx.Rngs(1)))
    nnx.update(gpt, params)
    return functools.partial(nnx.jit(GPT.__call__), gpt), params


def test_nats_are_summed_over_all_tokens_but_the_first(gpt_and_params):
    gpt, params = gpt_and_params
    windows = np.random.default_rng(0).integers(0, 11, (3, 7), np.uint8)
    logits = np.asarray(gpt(jnp.asarray(windows[:, :-1], jnp.int32)), np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    own = np.take_along_axis(chances, windows[:, 1:, None].astype(int), axis=-1)
    nats, count = jax.jit(task().score_fn)(params, (), jnp.asarray(windows))["loss"]
    np.testing.assert_allclose(nats, -np.log(own).sum(), rtol=1e-5)
    assert int(count) == 18


@pytest.mark.slow
def test_a_text_is_continued_from_its_last_tokens(gpt_and_params):
    gpt, params = gpt_and_params
    text = [3, 1, 4]
    for key in jax.random.split(jax.random.key(0), 40):
        logits = gpt(jnp.array([text[-CONFIG.context :]]))[0, -1]
        text.append(int(jax.random.categorical(key, logits[:9] / 0.7)))
    assert generated(params, " 3 1 4") == text
    few = generated(params, " 3", Sampling(temperature=50.0), known=2)
    assert set(few) == {0, 1, 3}


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("length", [1, 3, 6, 8])
def test_without_temperature_the_likeliest_token_follows(length, gpt_and_params):
    gpt, params = gpt_and_params
    text = [3, 1, 4, 1, 5, 2, 6, 0][:length]
    start = "".join(f" {token}" for token in text)
    for _ in range(10):
        logits = gpt(jnp.array([text[-CONFIG.context :]]))[0, -1]
        text.append(int(np.argmax(np.asarray(logits)[:9])))
    sampling = Sampling(temperature=0.0, tokens=10, seed=3)
    assert generated(params, start, sampling) == text
    # Nothing is left to draw.
    assert generated(params, start, Sampling(top_k=1, tokens=10)) == text


@pytest.mark.slow
def test_a_seed_repeats_a_text_and_its_beginning(gpt_and_params):
    _, params = gpt_and_params
    first, same, other, shorter = (
        generated(params, " 3", Sampling(seed=seed, tokens=tokens, temperature=2.0))
        for seed, tokens in ((1, 30), (1, 30), (2, 30), (1, 7))
    )
    assert first == same != other
    assert first[:8] == shorter


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_a_text_ends_where_the_model_ends_it(seed, gpt_and_params):
    _, params = gpt_and_params
    sampling = Sampling(seed=seed, temperature=5.0)
    whole = generated(params, " 3 8 1", sampling)  # Of the prompt none is an end.
    place = [*whole, 8].index(8, 3)
    assert generated(params, " 3 8 1", sampling, kind=Ending) == whole[:place]
    # Each text of several ends by itself.
    several = task(kind=Ending).generate(params, (), [" 3 8 1", " 2"], sampling)
    texts = ["".join(pieces).split() for pieces in several]
    assert texts[0] == list(map(str, whole[:place]))
    assert texts[1][0] == "2"
    assert "8" not in texts[1]


def test_a_text_comes_token_by_token(gpt_and_params):
    _, params = gpt_and_params
    (pieces,) = task(length=3).generate(params, (), [" 3 1"], Sampling())
    assert next(iter(pieces)) == " 3 1"
    assert [len(piece) for piece in pieces] == [2, 2, 2, 0]


def test_a_context_of_one_token_is_enough():
    config = changed(CONFIG, context=1)
    params, _ = jax.jit(task(config=config).init)(jax.random.key(0))
    assert len(generated(params, " 3 1", Sampling(tokens=3), config=config)) == 5


def test_windows_are_spread_from_the_first_to_the_last():
    batches = spread([np.array([i]) for i in range(10)], count=4, rows=3)
    assert [batch.ravel().tolist() for batch in batches] == [[0, 3], [6, 9]]
