"""Cuts a function in two: a part that can run at once, and one that awaits an input.

The gradient and the optimizer's direction await no message; `params = mixed + update`
does. The cut follows the equations of the traced function (its jaxpr), so it works for
any optimizer, wherever that uses the mixed model. Functions under `jax.jit` are cut
inside; a conditional, a loop or a custom derivative is one equation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AbstractMesh, Mesh

from decentjax._core.optimizer_state import check_no_own_model
from decentjax._core.slices import inside_worker, one_row
from decentjax.placement import axis_of, check_rows, over_workers
from decentjax.state import WorkerState
from decentjax.updates import Adapt, Metrics

NO_MESH = AbstractMesh((), ())


class Part(NamedTuple):
    """Some outputs of a cut function.

    Args:
      awaits: numbers of the awaited leaves that the outputs depend on.
      uses: numbers of the values of `Cut.early` that the outputs depend on.
      compute: function of these leaves and these values that returns the outputs.
    """

    awaits: tuple[int, ...]
    uses: tuple[int, ...]
    compute: Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class Cut:
    """A function of trees, cut where it uses its last argument.

    `early(*known)` returns a list of values: first the outputs that await nothing, with
    the numbers `finished`, then the values that `part(outputs)` uses.

    Args:
      function: function of arrays only.
      known: examples of its other arguments, arrays or `jax.ShapeDtypeStruct`s.
      awaited: example of its last argument.
      mesh: mesh in which the function runs.

    Raises:
      ValueError: if an equation that depends on the last argument has side effects,
        which would be lost or repeated.
    """

    def __init__(
        self,
        function: Callable,
        known: Sequence[Any],
        awaited: Any,
        mesh: AbstractMesh = NO_MESH,
    ):
        # The parts run for one worker inside shard_map. Shardings of a mesh that the
        # caller has set must not enter the trace.
        with jax.sharding.use_abstract_mesh(mesh):
            traced, out = jax.make_jaxpr(function, return_shape=True)(*known, awaited)
            closed = _without_calls(traced)
        jaxpr = closed.jaxpr
        num_known = len(jax.tree.leaves(known))
        self.structure = jax.tree.structure(out)
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._known = jaxpr.invars[:num_known]
        self._awaited = jaxpr.invars[num_known:]
        self._outputs = jaxpr.outvars

        # Equations are in order of their dependencies: one pass finds all that depend
        # on the awaited leaves.
        late = set(self._awaited)
        self._early_equations, self._late_equations = [], []
        for equation in jaxpr.eqns:
            if late.intersection(_variables(equation.invars)):
                # `part` drops equations that its outputs do not need, and evaluates
                # some in several parts: a print would be lost or repeated.
                if equation.effects:
                    raise ValueError(
                        f"{equation.primitive} has side effects and uses the mixed "
                        "model; do that after the step, on the params it returns"
                    )
                late.update(equation.outvars)
                self._late_equations.append(equation)
            else:
                self._early_equations.append(equation)
        self.finished = tuple(
            number
            for number, atom in enumerate(self._outputs)
            if isinstance(atom, Literal) or atom not in late
        )
        # Values that cross the cut: inputs of late equations computed by early ones.
        used = _variables(v for e in self._late_equations for v in e.invars)
        self._kept = [
            variable
            for variable in dict.fromkeys(used)
            if variable not in late and variable not in self._constants
        ]

    def early(self, *known: Any) -> list[Any]:
        """Returns the values that await nothing, for arguments like the examples."""
        leaves = jax.tree.leaves(known)
        values = self._constants | dict(zip(self._known, leaves, strict=True))
        _evaluate(self._early_equations, values)
        finished = [self._outputs[number] for number in self.finished]
        return [jnp.asarray(_read(values, atom)) for atom in [*finished, *self._kept]]

    def part(self, outputs: Iterable[int]) -> Part:
        """Returns the part that computes the given unfinished outputs.

        A value that two parts need, such as a norm over all updates, is computed in
        both.
        """
        wanted = [self._outputs[number] for number in outputs]
        # Backwards, as an equation is needed only if a later one uses its results.
        needed = set(_variables(wanted))
        equations = []
        for equation in reversed(self._late_equations):
            if needed.intersection(equation.outvars):
                needed.update(_variables(equation.invars))
                equations.insert(0, equation)
        awaits = [i for i, v in enumerate(self._awaited) if v in needed]
        uses = [i for i, v in enumerate(self._kept) if v in needed]
        first = len(self.finished)

        def compute(awaited: Sequence[Any], values: Sequence[Any]) -> list[Any]:
            known = dict(self._constants)
            known.update(zip([self._awaited[i] for i in awaits], awaited, strict=True))
            known.update(zip([self._kept[i] for i in uses], values, strict=True))
            _evaluate(equations, known)
            return [_read(known, variable) for variable in wanted]

        return Part(tuple(awaits), tuple(first + i for i in uses), compute)


def _without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inlines the calls of jitted functions."""

    def evaluate(*inputs: Any) -> list[Any]:
        return _call(closed, inputs)

    return jax.make_jaxpr(evaluate)(*closed.in_avals)


def _call(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    _evaluate(jaxpr.eqns, values)
    return [_read(values, atom) for atom in jaxpr.outvars]


def _evaluate(equations: Iterable[Any], values: dict[Any, Any]) -> None:
    """Evaluates the equations, and adds their results to the values."""
    for equation in equations:
        inputs = [_read(values, atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _results(equation, inputs), strict=True))


def _results(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    # "jit" is the name of the primitive in jax 0.10 to 0.12, an internal of jax.
    if equation.primitive.name == "jit":
        return _call(equation.params["jaxpr"], inputs)
    # As jax.core.eval_jaxpr does: some primitives bind functions, made of their params,
    # and an equation keeps the context it was traced in, such as the matmul precision.
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*inputs, **params)
    return results if equation.primitive.multiple_results else [results]


def _read(values: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


# Leaves are sent in groups of this size. One by one, the calls for small leaves would
# cost more than their bytes; all at once, the first leaf could not be updated before
# the last has arrived.
GROUP_BYTES = 4 * 2**20

LeafNumbers = tuple[int, ...]


class Stage(NamedTuple):
    """Leaves of the new state that are computed together.

    Args:
      leaves: numbers of the leaves.
      outputs: numbers of the leaves among them that await mixed leaves.
      part: what the outputs depend on.
      run: the compiled part, over stacked arrays.
    """

    leaves: LeafNumbers
    outputs: LeafNumbers
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


class Stages(NamedTuple):
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
    finished: LeafNumbers
    groups: list[Stage]
    rest: Stage
    structure: Any

    def state_of(self, outputs: dict[int, jax.Array]) -> tuple[WorkerState, Metrics]:
        leaves = [outputs[i] for i in range(self.structure.num_leaves)]
        return jax.tree.unflatten(self.structure, leaves)


def stages_of(
    adapt: Adapt, state: WorkerState, batch: Any, mesh: Mesh, is_whole: bool
) -> Stages:
    """Cuts a local update for arrays of these shapes.

    Args:
      adapt: the local update.
      state: stacked state.
      batch: stacked batch.
      mesh: mesh of the workers.
      is_whole: whether all leaves are one group.

    Raises:
      ValueError: if an array does not have a row for each worker, or `adapt` cannot be
        cut.
    """
    hint = "; in a job of several processes, place them first"
    check_rows({"state": state, "batch": batch}, mesh.shape[axis_of(mesh)], hint)
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
            "the local update runs without the workers' axis, and so without "
            f"collectives and axis_index ({error}): pass what it needs in the batch "
            "or the state"
        ) from error

    def early(params: Any, others: Any, batch: Any) -> list[jax.Array]:
        return cut.early(WorkerState(params, *others), batch)

    def stage(leaves: LeafNumbers) -> Stage:
        outputs = tuple(number for number in leaves if number not in cut.finished)
        part = cut.part(outputs)
        return Stage(leaves, outputs, part, jax.jit(over_workers(part.compute, mesh)))

    sizes = [x.nbytes // len(x) for x in jax.tree.leaves(state.params)]
    # About 64 groups at most: each costs one or two calls in every step.
    group_bytes = sum(sizes) if is_whole else max(GROUP_BYTES, sum(sizes) // 64)
    return Stages(
        # The params are not donated: the thread is still sending them.
        early=jax.jit(over_workers(early, mesh), donate_argnums=1),
        finished=cut.finished,
        groups=[stage(leaves) for leaves in _groups(sizes, group_bytes)],
        rest=stage(tuple(range(len(sizes), cut.structure.num_leaves))),
        structure=cut.structure,
    )


def _groups(sizes: Sequence[int], group_bytes: int) -> Iterator[LeafNumbers]:
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
