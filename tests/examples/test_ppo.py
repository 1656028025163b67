"""PPO against loops in float64, written from the papers alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rooms import navigate
from tests.trees import assert_close

PPOConfig, Transitions = navigate.PPOConfig, navigate.Transitions
advantages, ppo_loss = navigate.advantages, navigate.ppo_loss
T, B, ACTIONS = 9, 6, 3
OPTIONS = PPOConfig(
    discount=0.9, gae_lambda=0.8, clip=0.1, value_weight=0.7, entropy_weight=0.03
)


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture
def case():
    """Episodes of all lengths, none among them, and a policy that has changed."""
    random = np.random.default_rng(0)
    lengths = np.array([T, 1, 4, 0, 8, 5])
    old = log_softmax(random.normal(size=(T, B, ACTIONS)))
    action = random.integers(0, ACTIONS, (T, B))
    steps = Transitions(
        action=jnp.asarray(action, jnp.int32),
        log_prob=jnp.asarray(
            np.take_along_axis(old, action[..., None], axis=2)[..., 0], jnp.float32
        ),
        value=jnp.asarray(random.normal(size=(T, B)), jnp.float32),
        reward=jnp.asarray(random.normal(size=(T, B)), jnp.float32),
        played=jnp.asarray(np.arange(T)[:, None] < lengths[None]),
    )
    logits = jnp.asarray(old + random.normal(size=old.shape) / 5, jnp.float32)
    values = steps.value + jnp.asarray(random.normal(size=(T, B)) / 5, jnp.float32)
    return steps, logits, values, lengths


def looped_advantages(steps, lengths):
    """The sum of discounted errors, episode by episode."""
    g, decay = OPTIONS.discount, OPTIONS.discount * OPTIONS.gae_lambda
    value, reward = (np.asarray(x, np.float64) for x in (steps.value, steps.reward))
    found = np.zeros((T, B))
    for b, length in enumerate(lengths):
        for t in range(length):
            for k in range(t, length):
                after = value[k + 1, b] if k + 1 < length else 0.0
                error = reward[k, b] + g * after - value[k, b]
                found[t, b] += decay ** (k - t) * error
    return found


def looped_loss(steps, logits, values, lengths):
    logits, values, old, was = (
        np.asarray(x, np.float64) for x in (logits, values, steps.log_prob, steps.value)
    )
    found = looped_advantages(steps, lengths)
    places = [(t, b) for b, length in enumerate(lengths) for t in range(length)]
    chosen = np.array([found[place] for place in places])
    mean, deviation = chosen.mean(), chosen.std()
    gain = errors = entropy = 0.0
    for t, b in places:
        log_probs = log_softmax(logits[t, b])
        p = np.exp(log_probs[int(steps.action[t, b])] - old[t, b])
        scaled = (found[t, b] - mean) / deviation
        gain += min(p * scaled, min(max(p, 0.9), 1.1) * scaled)
        target = was[t, b] + found[t, b]
        near = was[t, b] + min(max(values[t, b] - was[t, b], -0.1), 0.1)
        errors += max((values[t, b] - target) ** 2, (near - target) ** 2)
        entropy -= (np.exp(log_probs) * log_probs).sum()
    gain, errors, entropy = (x / len(places) for x in (gain, errors, entropy))
    return -gain + 0.7 * errors / 2 - 0.03 * entropy, entropy


def test_advantages_are_discounted_sums_of_errors(case):
    steps, _, _, lengths = case
    got = advantages(steps, OPTIONS)
    np.testing.assert_allclose(got, looped_advantages(steps, lengths), atol=1e-5)


def test_with_a_trace_of_one_they_are_returns_less_values(case):
    steps, _, _, lengths = case
    options = PPOConfig(discount=1.0, gae_lambda=1.0)
    got = np.asarray(advantages(steps, options) + steps.value)
    for b, length in enumerate(lengths):
        left = np.asarray(steps.reward, np.float64)[:length, b][::-1].cumsum()[::-1]
        np.testing.assert_allclose(got[:length, b], left, atol=1e-5)


@pytest.mark.slow
def test_the_loss_is_that_of_the_paper(case):
    steps, logits, values, lengths = case
    loss, metrics = ppo_loss(logits, values, steps, advantages(steps, OPTIONS), OPTIONS)
    wanted, entropy = looped_loss(steps, logits, values, lengths)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert float(metrics["entropy"]) == pytest.approx(entropy, rel=1e-5)
    assert 0 < float(metrics["clipped"]) < 1


@pytest.mark.slow
def test_what_comes_after_the_end_changes_nothing(case):
    """Neither the loss nor its gradient, however large."""
    steps, logits, values, _ = case

    def loss(logits, values, steps):
        return ppo_loss(logits, values, steps, advantages(steps, OPTIONS), OPTIONS)[0]

    def garbled(x, huge):
        ended = ~steps.played.reshape(*steps.played.shape, *[1] * (x.ndim - 2))
        return jnp.where(ended, huge, x)

    wild = steps._replace(
        log_prob=garbled(steps.log_prob, -1e6), reward=garbled(steps.reward, 1e6)
    )
    both = jax.value_and_grad(loss, argnums=(0, 1))
    wanted = both(logits, values, steps)
    got = both(garbled(logits, 3.0), garbled(values, 1e6), wild)
    assert_close(got, wanted, atol=1e-6)


@pytest.mark.slow
def test_of_nothing_played_the_gradient_is_zero(case):
    steps, logits, values, _ = case
    none = steps._replace(played=jnp.zeros((T, B), bool))
    grad = jax.grad(
        lambda x: ppo_loss(x, values, none, advantages(none, OPTIONS), OPTIONS)[0]
    )(logits)
    np.testing.assert_array_equal(grad, np.zeros_like(grad))


def test_the_loss_of_a_narrow_policy_is_that_of_its_numbers(case):
    """Sums are in float32, also of logits and values in bfloat16."""
    steps, logits, values, _ = case
    narrow = [x.astype(jnp.bfloat16) for x in (logits, values)]
    wide = [x.astype(jnp.float32) for x in narrow]
    found = advantages(steps, OPTIONS)
    got = ppo_loss(*narrow, steps, found, OPTIONS)
    wanted = ppo_loss(*wide, steps, found, OPTIONS)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, y)
