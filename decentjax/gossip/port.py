"""The protocols of a port, which carries exchanges, and of a record."""

import abc
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from decentjax.compression import Leaves
from decentjax.process import phases
from decentjax.state import WorkerState

Arrival = Callable[[], Leaves]
"""Waits for averaged leaves, and returns them stacked, by number."""


@runtime_checkable
class Port(Protocol):
    """Transport of leaves between workers, which carries the exchanges of `Beside`.

    A subclass needs `carry` alone. The thread of the train step makes all calls: `open`
    once, then `carry` for each group of leaves that a step sends, in the same order in
    all processes, and `close` at the end or after an error. An error of the port, in a
    call or an arrival, is raised unchanged by the step.

    Attributes:
      takes_groups: whether a new model is sent group by group, each as soon as it is
        computed, rather than as a whole.
      phase: what a process does while it waits for messages, for the watch of a job:
        by default it may take as long as it needs, "exchanging" has a deadline.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, local_update, topology, worker_mesh
      >>> class Nobody(gossip.Port):
      ...     def carry(self, group, leaves, step):  # The only worker keeps its model.
      ...         return lambda: leaves
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> plan, mesh = topology.ring(1), worker_mesh(1)
      >>> with gossip.Beside(local, plan, mesh, Nobody()) as train_step:
      ...     state = train_step.init(jnp.zeros(3), jax.random.key(0))
      ...     state, metrics = train_step(state, jnp.ones((1, 3)), 0)
    """

    takes_groups: bool = True
    phase: str = phases.WAITING

    def open(
        self, state: WorkerState, groups: Sequence[Sequence[int]], step: int
    ) -> None:
        """Prepares for leaves like those of a state, before the first exchange.

        Args:
          state: stacked state of the workers of this process.
          groups: numbers of the leaves of each group, as in `jax.tree.leaves(params)`;
            over rounds that do not average whole models in every step a group is a
            fragment.
          step: the step about to run.
        """

    @abc.abstractmethod
    def carry(self, group: int, leaves: Leaves, step: int) -> Arrival:
        """Sends leaves; returns at once a function that waits for their averages.

        Over a topology the groups of a step are sent during the step before it.

        Args:
          group: number of the group.
          leaves: its leaves by number, [n, ...] with a row for each worker of this
            process, on its mesh. They may still be computing, and are never donated
            before `settle`. Over rounds with a compression each is a pair of the leaf
            and its encoded message: a port that only takes leaves refuses such rounds
            before the first step.
          step: number of the step whose exchange this is, or in which the round begins;
            its weights are `mixing_matrix(plan, step)`.

        Returns:
          A function of no arguments, called once by the same thread, in the order of
          the calls of `carry`. It returns averages of the same shapes, dtypes and
          shardings by number, and leaves that are no floats as they are. If a caller
          goes back to another state, it is never called, and the same step may be sent
          again with other leaves.
        """

    def settle(self) -> None:
        """Waits until no exchange reads its leaves, or hinders other programs."""

    def close(self, seconds: float) -> None:
        """Closes the port, and waits at most this long for messages in flight."""


class Record(Protocol):
    """Called with an activity of a process from `start` to `end` of `time.monotonic()`.

    The activity is "compute" (gradient and direction), "wait" (for mixed leaves) or
    "exchange" (for each group of leaves). Called by both threads.
    """

    def __call__(self, activity: str, step: int, start: float, end: float) -> None: ...


def ignore(activity: str, step: int, start: float, end: float) -> None:
    """Records nothing."""
    del activity, step, start, end
