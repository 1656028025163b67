"""A step in stages: a part that awaits no message, and groups of leaves that do.

The programs of `decentjax.gossip.Background`, compiled for stacked arrays on a mesh.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from decentjax._own_models import check_no_own_model
from decentjax._slices import inside_worker, one_row
from decentjax.axis import axis_of
from decentjax.gossip.cut import Cut, Part
from decentjax.local import Adapt
from decentjax.loss import Metrics
from decentjax.placement import check_rows, over_workers
from decentjax.state import WorkerState

# Leaves are sent in groups of this size. One by one, the calls for small leaves would
# cost more than their bytes; all at once, the first leaf could not be updated before
# the last has arrived.
GROUP_BYTES = 4 * 2**20

Leaves = tuple[int, ...]


class Stage(NamedTuple):
    """Leaves of the new state that are computed together.

    Args:
      leaves: numbers of the leaves.
      outputs: numbers of the leaves among them that await mixed leaves.
      part: what the outputs depend on.
      run: the compiled part, over stacked arrays.
    """

    leaves: Leaves
    outputs: Leaves
    part: Part
    run: Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]

    def compute(
        self, mixed: dict[int, jax.Array], values: list[jax.Array]
    ) -> Iterable[tuple[int, jax.Array]]:
        if not self.outputs:
            return ()
        awaited = [mixed[i] for i in self.part.awaits]
        used = [values[i] for i in self.part.uses]
        return zip(self.outputs, self.run(awaited, used), strict=True)


class Plan(NamedTuple):
    """A step in pieces.

    Args:
      early: function of (params, the rest of the state, batch), stacked, that returns
        the values of the cut.
      finished: numbers of the outputs with which these values begin.
      groups: stages of the params, each sent as soon as it is computed.
      rest: stage of all other outputs.
      structure: tree structure of all outputs, which are a state and metrics.
    """

    early: Callable[..., list[jax.Array]]
    finished: Leaves
    groups: list[Stage]
    rest: Stage
    structure: Any

    def state_of(self, outputs: dict[int, jax.Array]) -> tuple[WorkerState, Metrics]:
        leaves = [outputs[i] for i in range(self.structure.num_leaves)]
        return jax.tree.unflatten(self.structure, leaves)


def plan_of(
    plans: dict[Any, Plan],
    adapt: Adapt,
    state: WorkerState,
    batch: Any,
    mesh: Mesh,
    is_whole: bool = False,
) -> Plan:
    """Returns the plan for arrays of these shapes, made on first use.

    Args:
      plans: plans by the kind of arrays.
      adapt: the local update.
      state: stacked state.
      batch: stacked batch.
      mesh: mesh of the workers.
      is_whole: whether all leaves are one group.

    Raises:
      ValueError: if an array does not have a row for each worker, or `adapt` cannot be
        cut.
    """
    # As in `jax.jit`: a last, shorter batch is another program.
    leaves, structure = jax.tree.flatten((state, batch))
    kind = structure, tuple((x.shape, x.dtype) for x in leaves)
    if kind not in plans:
        hint = "; in a job of several processes, place them first"
        check_rows({"state": state, "batch": batch}, mesh.shape[axis_of(mesh)], hint)
        plans[kind] = make_plan(adapt, state, batch, mesh, is_whole)
    return plans[kind]


def make_plan(
    adapt: Adapt, state: WorkerState, batch: Any, mesh: Mesh, is_whole: bool
) -> Plan:
    check_no_own_model(state.opt_state, "an exchange beside the step")
    inside = inside_worker(mesh, axis_of(mesh))
    of_worker = jax.tree.map(lambda x: one_row(x, inside), (state, batch))
    try:
        cut = Cut(adapt, of_worker, of_worker[0].params, inside)
    except NameError as error:
        # What jax raises for a collective outside of shard_map; it has no separate
        # class.
        if "unbound axis" not in str(error):
            raise
        raise ValueError(
            f"adapt runs without the workers' axis, and so without collectives and "
            f"axis_index ({error}): pass what it needs in the batch or the state"
        ) from error

    def early(params: Any, others: Any, batch: Any) -> list[jax.Array]:
        return cut.early(WorkerState(params, *others), batch)

    def stage(leaves: Leaves) -> Stage:
        outputs = tuple(number for number in leaves if number not in cut.finished)
        part = cut.part(outputs)
        return Stage(leaves, outputs, part, jax.jit(over_workers(part.compute, mesh)))

    sizes = [x.nbytes // len(x) for x in jax.tree.leaves(state.params)]
    # About 64 groups at most: each costs one or two calls in every step.
    group_bytes = sum(sizes) if is_whole else max(GROUP_BYTES, sum(sizes) // 64)
    return Plan(
        # The params are not donated: the thread is still sending them.
        early=jax.jit(over_workers(early, mesh), donate_argnums=1),
        finished=cut.finished,
        groups=[stage(leaves) for leaves in _groups(sizes, group_bytes)],
        rest=stage(tuple(range(len(sizes), cut.structure.num_leaves))),
        structure=cut.structure,
    )


def _groups(sizes: Sequence[int], group_bytes: int) -> Iterator[Leaves]:
    """Splits leaves of these sizes, in bytes, into runs of at least `group_bytes`."""
    group, total = [], 0
    for number, size in enumerate(sizes):
        group.append(number)
        total += size
        if total >= group_bytes:
            yield tuple(group)
            group, total = [], 0
    if group:
        yield tuple(group)
