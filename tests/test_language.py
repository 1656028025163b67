"""Language modelling against the model itself, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.models.gpt import GPT, GPTConfig
from train.tasks.language import language, spread

CONFIG = GPTConfig(
    vocabulary=11, context=6, num_layers=1, num_heads=2, width=8, init_std=0.5
)


def model_and_params():
    params, _ = language(CONFIG).init(jax.random.key(0))
    gpt = GPT(CONFIG, rngs=nnx.Rngs(1))
    nnx.update(gpt, params)
    return gpt, params


def test_nats_are_summed_over_all_tokens_but_the_first_of_a_window():
    gpt, params = model_and_params()
    windows = np.random.default_rng(0).integers(0, 11, (3, 7), np.uint8)
    logits = np.asarray(gpt(jnp.asarray(windows[:, :-1], jnp.int32)), np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    own = np.take_along_axis(chances, windows[:, 1:, None].astype(int), axis=-1)
    nats, count = language(CONFIG).nats(params, jnp.asarray(windows))
    np.testing.assert_allclose(nats, -np.log(own).sum(), rtol=1e-5)
    assert int(count) == 18


def test_a_text_goes_on_by_what_the_model_makes_of_its_last_tokens():
    gpt, params = model_and_params()
    text = [3, 1, 4]
    for key in jax.random.split(jax.random.key(0), 40):
        logits = gpt(jnp.array([text[-CONFIG.context :]]))[0, -1]
        text.append(int(jax.random.categorical(key, logits[:9] / 0.7)))
    assert language(CONFIG).extend(params, [3, 1, 4], 40, 9) == text
    assert set(language(CONFIG).extend(params, [3], 40, 2)) == {0, 1, 3}


def test_windows_are_spread_from_the_first_to_the_last():
    batches = spread([np.array([i]) for i in range(10)], count=4, rows=3)
    assert [batch.ravel().tolist() for batch in batches] == [[0, 3], [6, 9]]
