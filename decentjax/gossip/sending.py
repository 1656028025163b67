"""An exchange of permutations in two parts, between which its messages travel."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from decentjax._collectives import AxisName
from decentjax._joining import join, places_of, split
from decentjax.codec import (
    Codec,
    _differences,
    _messages,
    as_permutations,
    check_encodable,
)
from decentjax.exchange import Exchange
from decentjax.mixing import (
    LeafMixing,
    Lowering,
    Routes,
    from_share,
    is_mixed,
    merged,
    message_dtype_of,
    node_share,
    rounded,
    routes_of,
)


class Sending(NamedTuple):
    """An exchange of permutations in two parts; messages are moved between them.

    Args:
      begin: function of one worker's tree that returns what `end` needs to keep, and
        the vectors to send.
      end: function of (tree, kept, came) that returns the mixed tree; `came` has the
        vectors that have come in each permute, zeros where none has.
      routes: (sender, receiver) of each message, by permute.
    """

    begin: Callable[[Any], tuple[Any, list[jax.Array]]]
    end: Callable[[Any, Any, list[list[jax.Array]]], Any]
    routes: Routes


def sending_of(
    exchange: Exchange, axis_name: AxisName, message_dtype: DTypeLike | None
) -> Sending:
    """The parts of `mix` for permutations; all float leaves of a dtype are one message.

    Args:
      exchange: exchange of permutations.
      axis_name: as in `mix`.
      message_dtype: as in `mix`.
    """
    own = Lowering()

    def how(x: jax.Array) -> LeafMixing:
        return LeafMixing(exchange, axis_name, message_dtype_of(x, message_dtype), own)

    def begin(params: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        leaves = list(filter(is_mixed, jax.tree.leaves(params)))
        ways = [how(x) for x in leaves]
        shares = [node_share(x, way) for x, way in zip(leaves, ways, strict=True)]
        pairs = zip(shares, ways, strict=True)
        sent = [rounded(x, way.message_dtype) for x, way in pairs]
        kept = shares if exchange.workers_per_node > 1 else []
        return kept, join(sent, places_of([x.dtype for x in sent]))

    def end(params: Any, kept: list[jax.Array], came: list[list[jax.Array]]) -> Any:
        leaves, structure = jax.tree.flatten(params)
        found = [place for place, x in enumerate(leaves) if is_mixed(x)]
        floats = [leaves[place] for place in found]
        shares, ways = kept or floats, list(map(how, floats))
        places = places_of([way.message_dtype for way in ways])
        parts = [split(one, places, [x.shape for x in shares]) for one in came]
        models = zip(*parts, strict=True)
        for place, way, share, arrived in zip(found, ways, shares, models, strict=True):
            mixed = merged(share, arrived, way)
            leaves[place] = from_share(leaves[place], mixed, way)
        return jax.tree.unflatten(structure, leaves)

    return Sending(begin, end, routes_of(exchange))


def sending_encoded(exchange: Exchange, codec: Codec, axis_name: AxisName) -> Sending:
    """The parts of `mix_encoded`; all arrays of a dtype are one message.

    Args:
      exchange: the exchange, of single workers.
      codec: the codec of the messages.
      axis_name: as in `mix_encoded`.
    """
    check_encodable(exchange)

    def begin(coded: Any) -> tuple[tuple, list[jax.Array]]:
        arrays = jax.tree.leaves(_messages(coded))
        return (), join(arrays, places_of([x.dtype for x in arrays]))

    def end(coded: Any, kept: tuple, came: list[list[jax.Array]]) -> Any:
        del kept
        arrays, structure = jax.tree.flatten(_messages(coded))
        places, shapes = places_of([x.dtype for x in arrays]), [x.shape for x in arrays]
        parts = [split(one, places, shapes) for one in came]
        messages = [jax.tree.unflatten(structure, one) for one in parts]
        return _differences(coded, messages, exchange, codec, axis_name)

    return Sending(begin, end, routes_of(as_permutations(exchange)))
