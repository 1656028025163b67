"""Rounds of communication: one algebra for local SGD, DiLoCo, NoLoCo and similar.

A worker with the model x has an anchor z, the model after its last round. A round

    sends     x, which the exchange averages to q = W x
    receives  g  = z - q              the pseudo-gradient
              z' = z + outer(g)       any optax transformation
              x  = merge(x now, x sent, z')

Without an outer optimizer there is no anchor, and z' = q. `send` and `receive` are one
worker's code; `decentjax.plan` places them around the local update.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from decentjax._core.collectives import is_mixed, sum_dtype
from decentjax._core.optimizer_state import check_averageable, check_no_own_model
from decentjax._core.slices import over_shards
from decentjax._rounds.leaves import (
    Stacked,
    as_fragments,
    as_stacked,
    at,
    check_cuts,
    cut_leaves,
    num_leaves,
    place_of,
    put,
    stacked_rows,
)
from decentjax._rounds.own_values import (
    first_values,
    packed,
    sent_with,
    unpacked,
    update_packed,
)
from decentjax._rounds.schedule import Fragment, Round, Schedule, every
from decentjax._rounds.sending import Compression, Leaves
from decentjax.codec import axes_of
from decentjax.compression import as_seen
from decentjax.exchange import Exchange, Topology
from decentjax.mixing import mix
from decentjax.placement import bound_axis
from decentjax.policy import Policy
from decentjax.state import (
    OwnState,
    RoundState,
    Values,
    WorkerState,
    check_arrays,
    check_optimizer,
)
from decentjax.updates import Adapt, LocalUpdate, Metrics, check_call, halves_of

__all__ = ["Rounds", "anchors", "blend", "cut_leaves", "replace", "shift"]

Mix = Callable[[Any, Exchange], Any]
"""Maps (params, exchange) to the mixed params; `mix` with its other arguments bound."""
Merge = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Maps (leaf now, leaf as sent, leaf of the round) to the merged leaf."""
Count = Callable[[Any], Sequence[int] | jax.Array]
"""Maps a batch, [workers, B, ...], to the number of tokens of each worker."""
TOKENS = -1  # In the place of the number of a leaf.


def mix_workers(params: Any, exchange: Exchange, **options: Any) -> Any:
    """`mix` over the axis of the workers."""
    return mix(params, exchange, bound_axis(), **options)


def replace(now: jax.Array, sent: jax.Array, new: jax.Array) -> jax.Array:
    """`z'`: drops what a worker has learned since it sent.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax.rounds import replace
      >>> print(replace(jnp.array(3.0), jnp.array(1.0), jnp.array(2.0)))
      2.0
    """
    del now, sent
    return new


def shift(now: jax.Array, sent: jax.Array, new: jax.Array) -> jax.Array:
    """`z' + x now - x sent`: keeps what a worker has learned since it sent.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax.rounds import shift
      >>> print(shift(jnp.array(3.0), jnp.array(1.0), jnp.array(2.0)))
      4.0
    """
    # The same array, sent and merged in one step: nothing was learned in between.
    if now is sent:
        return new
    dtype = sum_dtype(new)
    learned = now.astype(dtype) - sent.astype(dtype)
    return (new.astype(dtype) + learned).astype(new.dtype)


def blend(share: float) -> Merge:
    """`c (x now) + (1 - c) z'`, the merge of streaming DiLoCo.

    Args:
      share: c, the part of the worker's own model, in [0, 1]; with 1 only the anchor
        moves.

    Raises:
      ValueError: if the share is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax.rounds import blend
      >>> print(blend(0.25)(jnp.array(3.0), jnp.array(1.0), jnp.array(2.0)))
      2.25
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the own model's share must be in [0, 1], got {share}")

    def merge(now: jax.Array, sent: jax.Array, new: jax.Array) -> jax.Array:
        del sent
        dtype = sum_dtype(new)
        mixed = share * now.astype(dtype) + (1 - share) * new.astype(dtype)
        return mixed.astype(new.dtype)

    merge.__name__ = f"blend({share})"  # For errors.
    return merge


@dataclasses.dataclass(frozen=True)
class Rounds:
    """A plan in which models are averaged every H steps.

    With delay 0 round r (from 0) is at the end of step r H + H - 1, after its update.
    With delay d >= 1 it begins before step r H, and is merged just before the update of
    the d-th step, counting that one; the first then sends the initial models. Of P
    fragments the p-th begins floor(p H / P) steps after the first, which is sent in
    step r H; leaves in no fragment are not sent: each worker trains its own.

    With `count_tokens` means are weighted by n_j, what worker j has trained on since it
    last sent these leaves; of the complete graph it is FedAvg:

        q_i = sum_j W_ij n_j x_j / sum_j W_ij n_j

    A worker for which all these n_j are 0 keeps its model. Leaves are then sent times
    n_j, in float32 at least.

    A subclass is an algorithm that keeps or sends values of its own: `own` makes them,
    `update` is its step, `travels` names those that are averaged with the model, and
    `keeps_sums` is set if rounding or losing a message would never be made up for.
    The numbers of leaves are then those of `(model, {name: value})`.

    Args:
      topology: exchanges of the rounds, taken in turn.
      every: H, the steps from one round to the next.
      delay: d, steps until what was sent is merged, at most H.
      fragments: numbers of the leaves of each fragment, in the order of
        `jax.tree.leaves`, see `cut_leaves`; None sends whole models.
      outer: optimizer of the anchor, whose gradient is the pseudo-gradient; None moves
        the anchor to the average.
      merge: how a worker continues from the anchor: `replace`, `shift` or `blend(c)`.
      compression: how messages are encoded; None sends leaves unencoded.
      count_tokens: function that counts the tokens, or examples, of each worker in a
        batch, as in `gossip.Quorum`; here it is traced, with one worker. None gives all
        workers the same weight.
      stacked: number of rows, by number, of leaves whose rows along the leading dim,
        such as layers, count as leaves: fragments then name the leaves that the model
        would have with a list of its rows in the place of such a leaf.

    Raises:
      ValueError: if H is less than 1 or than the number of fragments, a fragment is
        empty, the delay is longer than H, there is an outer optimizer, but no local
        step between rounds, the compression does not fit the exchanges or is given
        with `count_tokens`, or the rows of a stacked leaf are all in one fragment.
      TypeError: if a part has the wrong type.

    Examples:
      >>> import optax
      >>> from decentjax import Rounds, topology
      >>> pairs = topology.random_matching(8, period=16, seed=0)
      >>> plan = Rounds(pairs, every=50, outer=optax.sgd(0.7, momentum=0.5))
    """

    travels: ClassVar[tuple[str, ...]] = ()
    keeps_sums: ClassVar[bool] = False

    topology: Topology | Policy
    every: int = 1
    delay: int = 0
    fragments: Sequence[Sequence[int]] | None = None
    outer: optax.GradientTransformation | None = None
    merge: Merge = shift
    compression: Compression | None = None
    count_tokens: Count | None = None
    stacked: Stacked = ()

    def __post_init__(self):
        stacked = as_stacked(self.stacked)
        object.__setattr__(self, "stacked", stacked)
        if self.fragments is not None:
            object.__setattr__(self, "fragments", as_fragments(self.fragments))
        check_cuts(self.fragments or (), stacked)
        if self.outer is not None:
            check_optimizer(self.outer)
        if not callable(self.merge):
            raise TypeError(
                "wanted a merge, such as rounds.shift or rounds.blend(0.5), got "
                f"{self.merge!r}"
            )
        check_call(self.merge, "merge", "now", "sent", "new")
        check_call(self.own, "own", "params")
        check_call(self.update, "update", "local", "state", "batch", "mixed", "own")
        if not isinstance(self.compression, Compression | None):
            raise TypeError(
                "wanted a Compression, such as error_feedback(codec.int8()), got "
                f"{type(self.compression).__name__}"
            )
        in_each_step = all(one.exchange for one in self.schedule.rounds)
        if self.outer and in_each_step and len(self.schedule.fragments) == 1:
            raise ValueError(
                "an outer optimizer moves models that have trained alone since the "
                "last round, but these rounds average them in every step: give a "
                "larger every, or no outer optimizer"
            )
        if self.compression is not None:
            self.compression.check(self.schedule, self.outer is not None)
        if self.count_tokens is not None:
            check_call(self.count_tokens, "count_tokens", "batch")
            if self.compression is not None:
                raise ValueError(
                    "means weighted by tokens send whole models: leave out the "
                    f"compression or count_tokens, got {self.compression.name}"
                )

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Which rounds begin and end in each step."""
        turns = 1 if self.compression is None else self.compression.turns
        return every(self.topology, self.every, self.delay, self.fragments, turns)

    @property
    def num_workers(self) -> int:
        return self.topology.num_workers

    @property
    def averages_models(self) -> bool:
        """Whether each step averages whole models, and nothing else is kept."""
        is_whole = self.every == 1 and self.fragments is None and self.delay <= 1
        parts = self.outer, self.compression, self.count_tokens
        is_bare = all(part is None for part in parts)
        return is_whole and is_bare and self.merge in (replace, shift)

    def own(self, params: Any) -> Values:
        """The first own values of a worker, by name, from the first model.

        Each is a pytree of arrays that the worker keeps beside its model. Those that
        `travels` names are averaged as the model is; if a worker is a slice of the
        mesh, each of them must be a tree like the params.
        """
        del params
        return {}

    def update(
        self,
        local: LocalUpdate,
        state: WorkerState,
        batch: Any,
        mixed: Any,
        own: Values,
    ) -> tuple[WorkerState, Values, Metrics]:
        """A step of one worker: a gradient, and a descent from the mixed model.

        It is a function of arrays alone, as a `LocalUpdate`. After it the model and the
        own values travel if the delay is 0, and before it otherwise.

        Args:
          local: the local update, with its halves `gradient` and `descend`.
          state: the worker's state, whose params are the model before the exchange.
          batch: the worker's batch.
          mixed: the model after the exchange; the same one with a delay of 0.
          own: the own values, after the exchange those that travel.

        Returns:
          The new state, the new own values, of the same kind, and the metrics.
        """
        new, metrics = local(state, batch, mixed)
        return new, own, metrics

    @property
    def has_hooks(self) -> bool:
        """Whether a subclass has own values, or an update of its own."""
        kind = type(self)
        return kind.own is not Rounds.own or kind.update is not Rounds.update

    def init(self, params: Any) -> Any:
        """What a worker keeps beside its model, `WorkerState.extra`.

        Raises:
          TypeError: if `own` returns no dict.
          ValueError: if the model does not have a leaf of a fragment, a round would
            send nothing, as exchanges average only floats, or an own value that travels
            is missing.
        """
        check_arrays(params, "init")
        if not self.has_hooks:
            return init_rounds(self, params)
        values = first_values(self, params)
        sent = sent_with(self.travels, params, values)
        return OwnState(init_rounds(self, sent), values)

    def pack(self, state: WorkerState) -> WorkerState:
        """The state whose params travel, from that of a worker; only rearranged."""
        if not self.has_hooks:
            return state
        if not isinstance(state.extra, OwnState):
            raise foreign_state(state.extra)
        return packed(self.travels, state)

    def unpack(self, state: WorkerState) -> WorkerState:
        """The inverse of `pack`."""
        return unpacked(state) if self.has_hooks else state

    def adapt(self, local: Adapt) -> Adapt:
        """The local update of packed states.

        Raises:
          TypeError: if it is none, or the plan has hooks and it has no halves.
        """
        if not callable(local):
            raise TypeError(
                "wanted a local update, as local_update(loss_fn, optimizer), got "
                f"{type(local).__name__}"
            )
        if not self.has_hooks:
            return local
        halves = halves_of(local, f"the plan {type(self).__name__}")
        return functools.partial(update_packed, self, halves)

    def pack_shards(self, shards: Any) -> Any:
        """The partition specs of what travels, from those of the params."""
        if not self.has_hooks:
            return shards
        return sent_with(self.travels, shards, dict.fromkeys(self.travels, shards))


def anchors(params: Any, carried: RoundState | OwnState) -> Any:
    """Returns the anchors of rounds, the models after the last ones, as a tree.

    Args:
      params: params, stacked or of one worker.
      carried: state of the rounds, `extra` of the `WorkerState` or of the state of
        `decentralize`.

    Returns:
      A tree like the params. Leaves without an anchor, of rounds without an outer
      optimizer or never sent, are the params.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import init_state, methods, rounds
      >>> params, plan = {"w": jnp.zeros(3)}, methods.diloco(2)
      >>> state = init_state(params, optax.adam(1e-3), jax.random.key(0), plan)
      >>> rounds.anchors(state.params, state.extra)["w"].shape
      (2, 3)
    """
    of = carried.carried if isinstance(carried, OwnState) else carried
    leaves, structure = jax.tree.flatten(params)
    found = [of.anchor.get(number, x) for number, x in enumerate(leaves)]
    return structure.unflatten(found)


def init_rounds(rounds: Rounds, params: Any) -> RoundState:
    """The first state of a worker in rounds of its params."""
    wanted = dict(rounds.stacked)
    if (found := stacked_rows(params, wanted)) != wanted:
        raise ValueError(
            f"stacked must say how many rows leaves of the model have, {found} by "
            f"number, got {wanted}"
        )
    parts = [_leaves_to_send(rounds, one, params) for one in rounds.schedule.fragments]
    leaves = functools.reduce(operator.or_, parts, {})
    is_late = rounds.delay > 1

    def wide(part: Leaves) -> Leaves:  # Copies, since a step donates each buffer once.
        return {n: jnp.array(x, sum_dtype(x), copy=True) for n, x in part.items()}

    sent = {n: jnp.array(x, x.dtype) for n, x in leaves.items()} if is_late else {}
    coded = None
    if rounds.compression is not None:
        rounds.compression.check_leaves(
            num_leaves(rounds.stacked, jax.tree.leaves(params))
        )
        coded = rounds.compression.init(rounds.schedule, leaves, is_late)
    tokens = None
    if rounds.count_tokens is not None:
        tokens = jnp.zeros((2, len(parts)))
    if rounds.outer is None:
        return RoundState({}, (), sent, coded, tokens)
    outer = tuple(rounds.outer.init(wide(part)) for part in parts)
    return RoundState(wide(leaves), outer, sent, coded, tokens)


def count_batch(rounds: Rounds, tokens: Any, batch: Any) -> Any:
    """The `RoundState.tokens` of a worker that has trained on a batch.

    Raises:
      ValueError: if any batch has no tokens, or the count is not that of one worker.
    """
    if rounds.count_tokens is None:
        return tokens
    found = rounds.count_tokens(jax.tree.map(lambda x: x[None], batch))
    number = jnp.asarray(found)
    if number.shape != (1,):
        raise ValueError(
            "count_tokens must return a number for each worker of a stacked batch, [1] "
            f"for one worker, got {list(number.shape)}"
        )
    is_known = not any(isinstance(x, Tracer) for x in jax.tree.leaves(found))
    if is_known and not found[0] > 0:
        raise ValueError(
            f"count_tokens returned {found[0]} for any batch, a weight with which no "
            "model would be averaged: return the positive number of its tokens"
        )
    return tokens.at[0].add(number[0].astype(tokens.dtype))


def send(rounds: Rounds, one: Round, state: WorkerState) -> WorkerState:
    """Begins a round: the state with its current leaves, encoded or not."""
    carried: RoundState = state.extra
    leaves = leaves_of(rounds, one.leaves, state.params)
    if carried.coded is not None:
        assert rounds.compression is not None
        coded = rounds.compression.encode(
            one, leaves, carried.anchor, state.key, carried.coded
        )
        carried = carried._replace(coded=coded)
    if carried.tokens is not None:
        part = rounds.schedule.fragments.index(one.leaves)
        new, zero = carried.tokens[0, part], jnp.zeros((), carried.tokens.dtype)
        tokens = carried.tokens.at[:, part].set(jnp.stack([zero, new]))
        carried = carried._replace(tokens=tokens)
    return state._replace(extra=carried._replace(sent=carried.sent | leaves))


def program_of(rounds: Rounds, one: Round) -> Round:
    """What `send` and `receive` depend on: of low rank all, else but the exchange."""
    coded = rounds.compression
    is_of_edges = coded is not None and not coded.sends_alike
    return one if is_of_edges else one._replace(exchange=None, number=0)


def receive(
    rounds: Rounds, one: Round, state: WorkerState, mixed: Leaves
) -> WorkerState:
    """Ends a round: `z' = z + outer(z - W x_sent)`, then `x = merge(x, x_sent, z')`.

    Args:
      rounds: the rounds.
      one: the round that ends.
      state: this worker's current state.
      mixed: the averages of the sent leaves, or the result of `default_mix` for encoded
        ones.

    Returns:
      The state with the model after the round, and the new anchor and outer state.
    """
    carried: RoundState = state.extra
    if carried.tokens is not None:
        mixed = _by_tokens(mixed, carried.sent)
    new = mixed
    if carried.coded is not None:
        assert rounds.compression is not None
        coded, new = rounds.compression.decode(
            one, mixed, carried.sent, carried.anchor, carried.coded
        )
        carried = carried._replace(coded=coded)
    if rounds.outer is not None:
        place = rounds.schedule.fragments.index(one.leaves)
        new, carried = _move_anchor(rounds.outer, place, new, carried)
    leaves, structure = jax.tree.flatten(state.params)
    for number in mixed:
        sent, place = carried.sent[number], place_of(rounds.stacked, number)
        merged = rounds.merge(at(leaves, *place), sent, new[number])
        put(merged.astype(sent.dtype), leaves, *place)
    # As in `mix`.
    params = lax.optimization_barrier(jax.tree.unflatten(structure, leaves))
    return state._replace(params=params, extra=carried)


def check_carried(state: WorkerState) -> None:
    """Raises a TypeError if a packed state cannot be that of rounds."""
    if not isinstance(state.extra, RoundState):
        raise foreign_state(state.extra)
    check_no_own_model(state.opt_state, "a round")
    check_averageable(state.opt_state)


def foreign_state(extra: Any) -> TypeError:
    """Returns the error of a state that is not that of the rounds."""
    return TypeError(
        "rounds need their own state: make it by step.init(params, key) or "
        f"init_state(params, optimizer, key, plan), got {type(extra).__name__}"
    )


def _by_tokens(mixed: Leaves, sent: Leaves) -> Leaves:
    """`sum_j W_ij n_j x_j / sum_j W_ij n_j` from the two sums, or the leaf as sent."""
    total = mixed[TOKENS]
    number, leaves = jnp.where(total > 0, total, 1), mixed.items()
    return {
        n: jnp.where(total > 0, x / number.astype(x.dtype), sent[n].astype(x.dtype))
        for n, x in leaves
        if n != TOKENS
    }


def travelling(rounds: Rounds, fragment: Fragment, state: WorkerState) -> Any:
    """What the exchange of a round averages: leaves, or pairs of leaf and message.

    Of weighted means leaves times the worker's tokens, and the tokens.
    """
    carried: RoundState = state.extra
    numbers = [n for n in carried.sent if fragment is None or n in fragment]
    if carried.tokens is not None:
        tokens = carried.tokens[..., 1, rounds.schedule.fragments.index(fragment)]
        return _weighed({n: carried.sent[n] for n in numbers}, tokens)
    if carried.coded is None:
        return {n: carried.sent[n] for n in numbers}
    return {n: (carried.sent[n], carried.coded.messages[n]) for n in numbers}


@jax.jit
def _weighed(leaves: Leaves, tokens: jax.Array) -> Leaves:
    """Leaves times tokens, and the tokens; of one worker, or stacked."""

    def weighed(x: jax.Array) -> jax.Array:
        rows = jnp.expand_dims(tokens, tuple(range(tokens.ndim, x.ndim)))
        return x.astype(sum_dtype(x)) * rows.astype(sum_dtype(x))

    return {n: weighed(x) for n, x in leaves.items()} | {TOKENS: tokens}


def default_mix(rounds: Rounds, shards: Any = None) -> Mix:
    """Returns the averaging over the axis of the workers, of plain or encoded leaves.

    Of rounds that average whole models in every step it is that of models.

    Args:
      rounds: the rounds.
      shards: as in `mix`; partition specs of the params.

    Raises:
      ValueError: if shards are given here for encoded leaves, whose codec needs them.
    """
    compression = rounds.compression
    if compression is None and shards is None:
        return mix_workers
    if compression is None:
        if rounds.averages_models:  # As trees of params, not as leaves by number.
            return functools.partial(mix_workers, shards=rounds.pack_shards(shards))
        return functools.partial(_mix_shards, _specs(rounds, shards))
    if shards is not None:
        raise ValueError(
            "encoded leaves take their shards from the compression: use "
            "error_feedback(..., shards=NamedShardings), and none here"
        )
    average = mix_of(compression)
    if compression.shards is None:
        return average
    shardings = jax.tree.leaves(compression.shards)
    return functools.partial(_mix_coded_shards, average, shardings)


def mix_of(compression: Compression) -> Callable[..., Any]:
    """Returns the averaging of encoded leaves over the axis of the workers."""

    def averaged(coded: Any, exchange: Exchange, axis_name: Any = None) -> Any:
        return compression.average(coded, exchange, axis_name or bound_axis())

    return averaged


def _specs(rounds: Rounds, shards: Any) -> dict[int, PartitionSpec]:
    """Partition specs by number, of rows without their leading dim."""
    found = jax.tree.leaves(rounds.pack_shards(shards))
    specs = {TOKENS: PartitionSpec()}
    for number in range(num_leaves(rounds.stacked, found)):
        leaf, row = place_of(rounds.stacked, number)
        spec = found[leaf]
        if row is not None and any(spec[:1]):
            raise ValueError(
                f"the rows of a stacked leaf lie on all devices of a slice, but leaf "
                f"{leaf} is sharded as {spec}: shard another dim, or leave it out of "
                "stacked"
            )
        specs[number] = spec if row is None else PartitionSpec(*spec[1:])
    return specs


def _mix_shards(
    specs: dict[int, PartitionSpec], leaves: Leaves, exchange: Exchange
) -> Leaves:
    of_leaves = {number: specs[number] for number in leaves}
    return mix_workers(leaves, exchange, shards=of_leaves)


def _mix_coded_shards(
    average: Callable, shardings: list[NamedSharding], coded: Any, exchange: Exchange
) -> Leaves:
    cut = {number: shardings[number] for number in coded}
    of_leaves = {number: one.spec for number, one in cut.items()}
    of_messages = {number: PartitionSpec(axes_of(one)) for number, one in cut.items()}
    in_specs = {number: (of_leaves[number], of_messages[number]) for number in coded}
    # Named here: inside, the axes of the slice are mapped too.
    axis = bound_axis()
    mixed = functools.partial(average, exchange=exchange, axis_name=axis)
    return over_shards(mixed, (in_specs,), of_leaves)(coded)


def without_messages(rounds: Rounds, state: WorkerState) -> WorkerState:
    """The state after a step, without messages merged in the step itself."""
    if rounds.delay > 1:
        return state
    coded = state.extra.coded
    if coded is not None:
        coded = coded._replace(messages={})
    return state._replace(extra=state.extra._replace(sent={}, coded=coded))


def leaves_of(rounds: Rounds, fragment: Fragment, params: Any) -> Leaves:
    """The leaves of a fragment that exchanges change, by number.

    Raises:
      ValueError: if the model has no such leaf.
    """
    leaves = jax.tree.leaves(params)
    count = num_leaves(rounds.stacked, leaves)
    numbers = range(count) if fragment is None else fragment
    if max(numbers, default=-1) >= count:
        raise ValueError(
            f"the schedule sends leaf {max(numbers)}, counted from 0, and the model "
            f"has {count}; inside optax.masked, only those that it leaves count"
        )

    # Shapes stay what they are.
    arrays = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves]
    found = {n: at(arrays, *place_of(rounds.stacked, n)) for n in numbers}
    return {n: x for n, x in found.items() if is_mixed(x)}


def _leaves_to_send(rounds: Rounds, fragment: Fragment, params: Any) -> Leaves:
    """The leaves of a fragment that exchanges change, at least one."""
    leaves = leaves_of(rounds, fragment, params)
    if not leaves:
        raise ValueError(
            "exchanges average floats, and there is none among the leaves "
            f"{fragment or 'of the model'}, whose round would send nothing: name "
            "others, as rounds.cut_leaves does, or leave it out"
        )
    return leaves


def _move_anchor(
    outer: optax.GradientTransformation, place: int, mixed: Leaves, carried: RoundState
) -> tuple[Leaves, RoundState]:
    """The anchor of one fragment after a step of its outer optimizer."""
    anchor = {number: carried.anchor[number] for number in mixed}
    # Relative to the workers' starting point: for a narrow leaf, the rounded anchor.
    gradient: Any = {
        number: as_seen(z, carried.sent[number]) - mixed[number].astype(z.dtype)
        for number, z in anchor.items()
    }
    updates, state = outer.update(gradient, carried.outer[place], anchor)
    new: Any = optax.apply_updates(anchor, updates)
    states = (*carried.outer[:place], state, *carried.outer[place + 1 :])
    return new, carried._replace(anchor=carried.anchor | new, outer=states)
