"""Language modelling against the model itself, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train.models.gpt import GPT, GPTConfig
from train.tasks.language import language_task, spread

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = GPTConfig(
    vocabulary=11, context=6, num_layers=1, num_heads=2, width=8, init_std=0.5
)


class Numbers(int):
    """That many tokens, each its own text."""

    __len__ = int.__int__

    def encode(self, rows):
        return rows

    decode = encode


def task(known=9, length=40):
    return language_task(
        CONFIG,
        dtype=np.uint8,
        score="loss",
        vocabulary=lambda: Numbers(known),
        prompt="",
        length=length,
        steps=None,
        validation=None,
    )


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


def test_a_text_is_continued_from_its_last_tokens(gpt_and_params):
    gpt, params = gpt_and_params
    text = [3, 1, 4]
    for key in jax.random.split(jax.random.key(0), 40):
        logits = gpt(jnp.array([text[-CONFIG.context :]]))[0, -1]
        text.append(int(jax.random.categorical(key, logits[:9] / 0.7)))
    assert task().generate(params, (), [[3, 1, 4]]) == [text]
    (few,) = task(known=2).generate(params, (), [[3]])
    assert set(few) == {0, 1, 3}


def test_windows_are_spread_from_the_first_to_the_last():
    batches = spread([np.array([i]) for i in range(10)], count=4, rows=3)
    assert [batch.ravel().tolist() for batch in batches] == [[0, 3], [6, 9]]
