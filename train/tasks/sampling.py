"""How a language model continues a text, token by token."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.fields import checked


@checked
class Sampling:
    """How the tokens of a text are chosen.

    Args:
      tokens: greatest number of tokens that are generated after each text, which ends
        earlier if the model ends it; by default as in the config of the run.
      temperature: divisor of the logits; 0 takes the likeliest token.
      top_k: number of the likeliest tokens that each is drawn from; by default all.
      seed: seed of the draws, the same for each text.
    """

    tokens: int | None = None
    temperature: float = 0.7
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self):
        for name, least in {
            "tokens": 1,
            "temperature": 0,
            "top_k": 1,
            "seed": 0,
        }.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


def draw(
    logits_V: jax.Array, key: jax.Array, known: int, sampling: Sampling
) -> jax.Array:
    """Returns a token drawn from softmax(logits / temperature), int32.

    Args:
      logits_V: logits of all tokens.
      key: key of the draw.
      known: number of tokens that the text has, of which one is drawn.
      sampling: temperature and top_k.
    """
    logits_V = logits_V[:known]
    if sampling.temperature == 0:
        return logits_V.argmax()
    if sampling.top_k is not None:
        values, ids = jax.lax.top_k(logits_V, min(sampling.top_k, known))
        # By their ids, not from the k-th value on: of equal logits only k are kept.
        logits_V = jnp.full_like(logits_V, -jnp.inf).at[ids].set(values)
    # The largest is 0, so that no quotient overflows.
    return jax.random.categorical(
        key, (logits_V - logits_V.max()) / sampling.temperature
    )


def continued(
    extend: Callable[..., tuple[jax.Array, Any]],
    choose: Callable[[jax.Array, jax.Array], jax.Array],
    cache: Any,
    context: int,
    tokens: Sequence[int],
    keys: jax.Array,
    end: int | None,
) -> Iterator[list[int]]:
    """Yields the tokens of a text, and again after each token that is added.

    A text that is longer than the context is continued from its last tokens. It ends
    where the model ends it: the next token would be of another document.

    Args:
      extend: maps tokens [T], the position of the first, the index of the last and a
        cache to the logits of the next token [V] and the cache with these tokens.
      choose: maps logits and a key to the next token.
      cache: an empty cache.
      context: length of the longest sequence, in tokens.
      tokens: the text.
      keys: a key for each token that is added.
      end: token between two documents, which is not added; None if there is none.
    """
    text = list(tokens)
    yield text
    for number, key in enumerate(keys):
        if number and len(text) <= context:
            read, position, last = text[-1:], len(text) - 1, 0
        else:
            # At first; and beyond the context, where with each token all positions
            # change, and so all keys and values. Padded to one shape, compiled once.
            tail = text[-context:]
            read, position, last = tail + [0] * (context - len(tail)), 0, len(tail) - 1
        logits, cache = extend(np.array(read, np.int32), position, last, cache)
        token = int(choose(logits, key))
        if token == end:
            return
        text.append(token)
        yield text


def spelled(
    decode: Callable[[Sequence[Sequence[int]]], list[str]],
    texts: Iterable[Sequence[int]],
) -> Iterator[str]:
    """Yields what each text adds to the one before, in whole characters.

    Only the newest tokens are decoded, behind those shown last, on which their spaces
    depend: no time grows with the text.
    """
    before, shown, added = 0, 0, ""
    for tokens in texts:
        known, text = decode([tokens[before:shown], tokens[before:]])
        added = text[len(known) :]
        # A character of several bytes is U+FFFD until its last byte is there.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield added
            before, shown, added = shown, len(tokens), ""
    yield added
