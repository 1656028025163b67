"""The engine of this package: a step whose messages are sent beside it.

The gradient is computed while messages are in flight. A port carries them: a second
thread with collectives, peers, groups of peers, the record of a run, or your own.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from decentjax._core.optimizer_state import check_no_own_model
from decentjax._rounds.schedule import Round
from decentjax._rounds.sending import Compression, Leaves
from decentjax.gossip.engine import CLOSING_SECONDS, Closing
from decentjax.gossip.pipeline import Stage, Stages, stages_of
from decentjax.gossip.port import Arrival, Port, Record, ignore
from decentjax.placement import (
    axis_of,
    check_mesh,
    local_workers,
    over_workers,
    place,
    slices_of,
)
from decentjax.plan import (
    GradientMean,
    Plan,
    check_plan,
    first_state,
    rounds_of,
    warn_of_plan,
)
from decentjax.process import phases
from decentjax.rounds import (
    Rounds,
    check_carried,
    count_batch,
    leaves_of,
    program_of,
    receive,
    send,
    travelling,
    without_messages,
)
from decentjax.state import RoundState, WorkerState, strong
from decentjax.train_step import StepCount, check_not_donated
from decentjax.updates import Adapt, Metrics, init_of

NewState = tuple[WorkerState, Metrics]


class Beside(Closing):
    """A train step whose exchanges a port carries; a context manager.

    Models that are averaged in every step are sent group by group: each group of leaves
    is updated as soon as its averages have arrived, and sent at once. `Background` and
    `Peers` are this step with ports of their own.

    Args:
      local: the local update, as `local_update` returns it.
      plan: topology or rounds.
      mesh: mesh of the workers in the stacked arrays: those of this process.
      port: what carries the exchanges.
      record: function that is called with each activity of this process.
      workers: numbers of the workers of the mesh, if these are not all of the plan's.

    Attributes:
      plan: the plan.

    Raises:
      TypeError: if the plan is neither topology nor rounds, or the port is none.
      ValueError: if messages of slices are to be encoded, or the mesh has a different
        number of workers.
    """

    def __init__(
        self,
        local: Adapt,
        plan: Plan,
        mesh: Mesh,
        port: Port,
        record: Record | None = None,
        workers: Sequence[int] | None = None,
    ):
        rounds = check_beside(plan)
        warn_of_plan(plan)
        _check_port(port, mesh, workers)
        _check_encodes(rounds.compression, mesh)
        of_packed = rounds.adapt(local)

        def adapt(state: WorkerState, batch: Any, mixed: Any) -> NewState:
            new, metrics = of_packed(state, batch, mixed)
            return jax.tree.map(strong, new), metrics

        self._local, self._adapt, self.plan = local, adapt, plan
        self._rounds, self._mesh, self._numbers = rounds, mesh, workers
        self._port, self._record = port, record or ignore
        self._is_open, self._next = False, -1
        # Peers know messages by their step, whatever the period.
        is_counted = port.phase == phases.WAITING or rounds.schedule.period > 1
        self._steps = StepCount() if is_counted else None
        self._arriving: collections.deque[Arrival] = collections.deque()
        self._sent: list[jax.Array] = []
        self._extra: Any = None
        self._known: dict[Any, Stages] = {}
        self._whole = _compiled(adapt, mesh)
        self._is_of_models = rounds.averages_models
        self._programs = functools.cache(functools.partial(_programs, rounds, mesh))
        counted = functools.partial(count_batch, rounds)
        self._count_batch = jax.jit(over_workers(counted, mesh))

    def init(self, params: Any, key: jax.Array, model_state: Any = ()) -> WorkerState:
        """Returns the first state of the workers of this process, on their mesh.

        Args:
          params: one model, the same in all processes.
          key: random key, split among the workers.
          model_state: as in `init_state`.

        Raises:
          TypeError: if the local update has no optimizer, as a function of your own.
        """
        begin, own = init_of(self._local), self._workers()
        state = first_state(params, begin, key, self.plan, model_state, own)
        return place(state, self._mesh)

    def _workers(self) -> Sequence[int]:
        """The numbers of the workers of this process."""
        count = self._mesh.shape[axis_of(self._mesh)]
        if self._numbers is None and count != self.plan.num_workers:
            raise ValueError(
                f"the mesh has {count} of the plan's {self.plan.num_workers} workers: "
                "pass their numbers as workers"
            )
        return self._numbers or local_workers(self._mesh)

    def share(self, other: "Beside") -> None:
        """Reuses the compiled programs of a step of the same local update and mesh."""
        self._known, self._whole = other._known, other._whole

    def __call__(self, state: WorkerState, batch: Any, step: int) -> NewState:
        """Returns the new state and metrics, as `advance` does."""
        return self.advance(state, batch, step)

    def advance(self, state: WorkerState, batch: Any, step: int) -> NewState:
        """Returns the new state and metrics.

        The state's buffers are donated, except those of its params, which live until
        the exchange is done, and those of the rounds.

        Raises:
          TypeError: if the state lacks the state of the rounds.
          ValueError: if an array does not have a row for each worker, `local` cannot be
            cut, or the state was donated to an earlier step.
          BaseException: any error of an exchange, unchanged.
        """
        *_, new = self.begin(self._rounds.pack(state), batch, step)
        assert new is not None
        phases.note(phases.BETWEEN)
        state, metrics = new
        return self._rounds.unpack(state), metrics

    def begin(
        self, state: WorkerState, batch: Any, step: int
    ) -> Iterator[NewState | None]:
        """A step of packed states in two parts: None once its messages are sent.

        If its messages follow its update, the first part computes the update.
        """
        check_not_donated(state, batch, state[1 : 5 if self._is_of_models else 4])
        self._open(state, batch, step)
        if self._steps is not None:
            self._steps.note(step)
        if not self._is_of_models:
            return self._in_rounds(state, batch, step)
        begin = self._in_groups if self._rounds.delay else self._after
        return begin(state, batch, step)

    def settle(self) -> None:
        """Waits for the exchanges in flight; call it before any other collective."""
        self._port.settle()

    def skip_to(self, step: int) -> None:
        """Leaves out steps in which no round begins or ends: what is sent stays so."""
        self._next = step
        if self._steps is not None:
            self._steps.last = step - 1

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Closes the port, which waits at most this long for messages in flight."""
        self._port.close(seconds)

    def _open(self, state: WorkerState, batch: Any, step: int) -> None:
        if not self._is_open:
            phases.note(self._port.phase, step)
            self._port.open(state, self._groups(state, batch), step)
            self._is_open = True

    def _groups(self, state: WorkerState, batch: Any) -> list[Sequence[int]]:
        """Numbers of the leaves that are sent together."""
        if not self._is_of_models:
            check_carried(state)
            fragments = self._rounds.schedule.fragments
            rows = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params
            )
            numbers = functools.partial(leaves_of, self._rounds)
            found = [
                jax.eval_shape(functools.partial(numbers, one), rows)
                for one in fragments
            ]
            return [tuple(leaves) for leaves in found]
        if self._rounds.delay:
            return [stage.leaves for stage in self._stages(state, batch).groups]
        check_no_own_model(state.opt_state, "an exchange beside the step")
        return [range(len(jax.tree.leaves(state.params)))]

    def _compile(self, state: WorkerState, batch: Any) -> None:
        """Compiles the programs of a step by running them; drops the results."""
        rounds, known = self._rounds, jax.tree.map(jnp.copy, state)  # It is donated.
        if not self._is_of_models:
            known = known._replace(extra=())
            begun = [one for one in rounds.schedule.rounds if one.exchange]
            for one in dict.fromkeys(program_of(rounds, one) for one in begun):
                begin, end = self._programs(one)
                extra = begin(state.params, state.key, state.extra)
                sent = travelling(rounds, one.leaves, state._replace(extra=extra))
                if rounds.compression is None:
                    end(state.params, extra, sent)
            self._whole(*jax.tree.map(jnp.copy, (known.params, known[1:])), batch)
        if rounds.delay:
            stages = self._stages(known, batch)
            values = stages.early(known.params, known[1:], batch)
            mixed = dict(enumerate(jax.tree.leaves(known.params)))
            for stage in (*stages.groups, stages.rest):
                stage.compute(mixed, values)

    def _stages(self, state: WorkerState, batch: Any) -> Stages:
        # As in `jax.jit`: a last, shorter batch is another program.
        leaves, structure = jax.tree.flatten((state, batch))
        kind = structure, tuple((x.shape, x.dtype) for x in leaves)
        if kind not in self._known:
            how = self._mesh, not self._port.takes_groups
            self._known[kind] = stages_of(self._adapt, state, batch, *how)
        return self._known[kind]

    def _in_groups(self, state: WorkerState, batch: Any, step: int) -> Iterator[Any]:
        """`x <- W x + update(grad f(x))`, whose messages are sent a step ahead."""
        stages = self._stages(state, batch)
        self._send_models(jax.tree.leaves(state.params), stages, step)
        # From here on groups are sent for the next step; `arriving` is for this one. If
        # this call raises, `_sent` is incomplete, and the next call sends its own.
        self._sent, self._next = [], step + 1
        arriving, self._arriving = self._arriving, collections.deque()
        yield None
        values = self._run(stages.early, state, batch, step)
        outputs = dict(zip(stages.finished, values, strict=False))
        mixed: Leaves = {}
        for group, stage in enumerate(stages.groups):
            self._await(stage, arriving, mixed, step)
            outputs.update(stage.compute(mixed, values))
            # Without waiting for the outputs, which may still be computing.
            self._carry_group(group, stage, outputs, step + 1)
        if stages.rest.outputs:
            self._await(stages.rest, arriving, mixed, step)
            outputs.update(stages.rest.compute(mixed, values))
        yield stages.state_of(outputs)

    def _send_models(self, models: list[jax.Array], stages: Stages, step: int) -> None:
        """Sends the models of a step, unless the previous step has done so."""
        # Other arrays, or another step, are sent now; messages in flight are dropped.
        # Identity is a safe test: `_sent` keeps its arrays alive, so no id is reused.
        if self._next == step and list(map(id, models)) == list(map(id, self._sent)):
            return
        self._arriving.clear()
        models = place(models, self._mesh)
        for group, stage in enumerate(stages.groups):
            self._carry_group(group, stage, dict(enumerate(models)), step)

    def _carry_group(self, group: int, stage: Stage, models: Leaves, step: int) -> None:
        sent = {number: models[number] for number in stage.leaves}
        self._sent += sent.values()
        self._arriving.append(self._port.carry(group, sent, step))

    def _await(
        self,
        stage: Stage,
        arriving: collections.deque[Arrival],
        mixed: Leaves,
        step: int,
    ) -> None:
        """Waits for averages, which arrive in the order in which leaves were sent."""
        with self._doing("wait", self._port.phase, step):
            while not mixed.keys() >= set(stage.part.awaits):
                mixed.update(arriving.popleft()())

    def _after(self, state: WorkerState, batch: Any, step: int) -> Iterator[Any]:
        """`x <- W (x + update(grad f(x)))`."""
        new, metrics = self._run(self._whole, state, batch, step)
        leaves, structure = jax.tree.flatten(new.params)
        arrival = self._port.carry(0, dict(enumerate(leaves)), step)
        yield None
        mixed = self._arrived(arrival, step)
        params = jax.tree.unflatten(structure, [mixed[i] for i in range(len(leaves))])
        yield new._replace(params=params), metrics

    def _in_rounds(self, state: WorkerState, batch: Any, step: int) -> Iterator[Any]:
        """A step of rounds, with each part a separate program."""
        check_carried(state)
        sends, receives = self._rounds.schedule[step]
        bare = state._replace(extra=())
        if self._rounds.delay == 0:
            new, metrics = self._run(self._whole, bare, batch, step)
            new = new._replace(extra=self._counted(state.extra, batch))
            if sends:
                new = self._send(sends, new, step)
                yield None
                new = self._receive(sends, new, step)
        else:
            self._send_again(state, step)
            mixed = self._send(sends, state, step) if sends else state
            yield None
            if receives:
                mixed, new, metrics = self._merged(receives, mixed, batch, step)
            else:
                new, metrics = self._run(self._whole, bare, batch, step)
            new = new._replace(extra=self._counted(mixed.extra, batch))
        new = without_messages(self._rounds, new)
        self._next, self._extra = step + 1, new.extra
        yield new, metrics

    def _counted(self, extra: RoundState, batch: Any) -> RoundState:
        """The state of rounds after a step on a batch."""
        if extra.tokens is None:
            return extra
        return extra._replace(tokens=self._count_batch(extra.tokens, batch))

    def _send_again(self, state: WorkerState, step: int) -> None:
        """Sends the messages in flight before a step, if the state is from another run.

        Messages in flight belong to the state that the last call returned.
        """
        if step == self._next and state.extra is self._extra:
            return
        self._arriving.clear()
        for begun in range(max(0, step - self._rounds.delay + 1), step):
            if one := self._rounds.schedule[begun].sends:
                self._carry(one, state, begun)

    def _send(self, one: Round, state: WorkerState, step: int) -> WorkerState:
        begin, _ = self._programs(program_of(self._rounds, one))
        extra = begin(state.params, state.key, state.extra)
        state = state._replace(extra=extra)
        self._carry(one, state, step)
        return state

    def _carry(self, one: Round, state: WorkerState, step: int) -> None:
        group = self._rounds.schedule.fragments.index(one.leaves)
        sent = travelling(self._rounds, one.leaves, state)
        self._arriving.append(self._port.carry(group, sent, step))

    def _merged(
        self, one: Round, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, WorkerState, Metrics]:
        """The state after a round, and that after the step, with its metrics."""
        known = state._replace(extra=())  # Messages in flight must not be donated.
        stages = self._stages(known, batch)
        values = self._run(stages.early, known, batch, step)
        mixed = self._receive(one, state, step)
        leaves = dict(enumerate(jax.tree.leaves(mixed.params)))
        outputs = dict(zip(stages.finished, values, strict=False))
        for stage in (*stages.groups, stages.rest):
            outputs.update(stage.compute(leaves, values))
        return mixed, *stages.state_of(outputs)

    def _receive(self, one: Round, state: WorkerState, step: int) -> WorkerState:
        mixed = self._arrived(self._arriving.popleft(), step)
        _, end = self._programs(program_of(self._rounds, one))
        params, extra = end(state.params, state.extra, mixed)
        return state._replace(params=params, extra=extra)

    def _arrived(self, arrival: Arrival, step: int) -> Leaves:
        with self._doing("wait", self._port.phase, step):
            return arrival()

    def _run(
        self, compiled: Callable, state: WorkerState, batch: Any, step: int
    ) -> Any:
        """Runs the local update, or its part that awaits no message."""
        with self._doing("compute", "computing", step):
            # Donates all but the params, which are still being sent. The record says
            # when the computing was done, not when it was dispatched.
            new = jax.block_until_ready(compiled(state.params, state[1:], batch))
        self._trained(batch)
        return new

    @contextlib.contextmanager
    def _doing(self, activity: str, phase: str, step: int) -> Iterator[None]:
        """Records an activity, unless it raises."""
        phases.note(phase, step)
        start = time.monotonic()
        yield
        self._record(activity, step, start, time.monotonic())

    def _trained(self, batch: Any) -> None:
        """Called once a step is computed, before its model is sent."""


def check_beside(plan: Plan) -> Rounds:
    """Returns a plan as rounds, or raises an error if no port can carry them."""
    check_plan(plan)
    if isinstance(plan, GradientMean):
        raise TypeError(
            "wanted a topology or Rounds, whose exchanges of models run beside the "
            "step, got GradientMean: use gossip.AllReduce, or on_mesh"
        )
    rounds = rounds_of(plan)
    if rounds.schedule.turn is not None:
        raise ValueError(
            "a policy chooses the exchange of a step before it begins, and beside the "
            "step messages are on their way by then: use simulate or on_mesh"
        )
    if rounds.compression is not None and rounds.compression.shards is not None:
        raise ValueError(
            "beside the step messages of slices are not encoded: leave the "
            "compression's shards at None, or use on_mesh"
        )
    return rounds


def _check_port(port: Port, mesh: Mesh, workers: Sequence[int] | None) -> None:
    if isinstance(port, type) or not isinstance(port, Port):
        raise TypeError(
            "wanted a port, such as an instance of a subclass of gossip.Port, got "
            f"{port!r}"
        )
    check_mesh(mesh)
    count = mesh.shape[axis_of(mesh)]
    if workers is not None and len(set(workers)) != count:
        raise ValueError(
            f"workers are the different numbers of the {count} workers of the mesh, "
            f"got {workers}"
        )


def _check_encodes(compression: Compression | None, mesh: Mesh) -> None:
    """Raises a ValueError if messages of slices are to be encoded."""
    if compression is not None and len(slices_of(mesh)[0]) > 1:
        raise ValueError(
            "beside the step messages are encoded for workers of one device, but these "
            f"are slices of the mesh {dict(mesh.shape)}: use on_mesh, in "
            "the trainer the exchange in_step, or no compression"
        )


def _compiled(adapt: Adapt, mesh: Mesh) -> Callable[..., NewState]:
    def local(params: Any, others: Any, batch: Any) -> NewState:
        return adapt(WorkerState(params, *others), batch, params)

    # The params may still be in flight.
    return jax.jit(over_workers(local, mesh), donate_argnums=1)


def _programs(rounds: Rounds, mesh: Mesh, one: Round) -> tuple[Any, Any]:
    """Begin and end of a round."""

    def begin(params: Any, key: Any, extra: Any) -> Any:
        return send(rounds, one, WorkerState(params, (), (), key, extra)).extra

    def end(params: Any, extra: Any, mixed: Leaves) -> Any:
        state = WorkerState(params, (), (), jax.random.key(0), extra)
        new = receive(rounds, one, state, mixed)
        return new.params, new.extra

    return jax.jit(over_workers(begin, mesh)), jax.jit(over_workers(end, mesh))
