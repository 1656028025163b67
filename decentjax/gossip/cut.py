"""Cuts a function in two: what can be computed at once, and what awaits an input.

The gradient and the optimizer's direction await no message, `params = mixed + update`
does. Which is which is read from the traced function, so it holds for any optimizer,
wherever it uses the mixed model. What a function under `jax.jit` does counts line by
line; a conditional, a loop or a custom derivative is one line.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

NO_MESH = jax.sharding.AbstractMesh((), ())


class Part(NamedTuple):
    """Some outputs of a cut function.

    Args:
      awaits: numbers of the awaited leaves that they depend on.
      uses: numbers of the values of `Cut.early` that they depend on.
      compute: (awaited leaves, values), those and in that order, to the outputs.
    """

    awaits: tuple[int, ...]
    uses: tuple[int, ...]
    compute: Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class Cut:
    """A function of trees, cut where its last argument comes in.

    `early(*known)` returns a list of values: first the outputs that await nothing,
    those of the numbers `finished`, then what `part(outputs)` uses to compute others.

    Args:
      function: of arrays alone.
      known: examples of its arguments, arrays or `jax.ShapeDtypeStruct`s.
      awaited: an example of its last argument.

    Raises:
      ValueError: if what awaits the last argument has side effects, which would be
        lost, or come twice.
    """

    def __init__(self, function: Callable, known: Sequence[Any], awaited: Any):
        # It will run for one worker, inside of whatever mesh the caller has set.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            traced, out = jax.make_jaxpr(function, return_shape=True)(*known, awaited)
            closed = _without_calls(traced)
        jaxpr = closed.jaxpr
        num_known = len(jax.tree.leaves(known))
        self.structure = jax.tree.structure(out)
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._known = jaxpr.invars[:num_known]
        self._awaited = jaxpr.invars[num_known:]
        self._outputs = jaxpr.outvars

        late = set(self._awaited)
        self._early_equations, self._late_equations = [], []
        for equation in jaxpr.eqns:
            if late.intersection(_variables(equation.invars)):
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
        used = _variables(v for e in self._late_equations for v in e.invars)
        self._kept = [
            variable
            for variable in dict.fromkeys(used)
            if variable not in late and variable not in self._constants
        ]

    def early(self, *known: Any) -> list[Any]:
        """Returns the values that await nothing, of arguments like the examples."""
        leaves = jax.tree.leaves(known)
        values = self._constants | dict(zip(self._known, leaves, strict=True))
        _evaluate(self._early_equations, values)
        finished = [self._outputs[number] for number in self.finished]
        return [jnp.asarray(_read(values, atom)) for atom in [*finished, *self._kept]]

    def part(self, outputs: Iterable[int]) -> Part:
        """Returns how to compute outputs that are not finished.

        What two parts both need, such as a norm over all updates, both compute.
        """
        wanted = [self._outputs[number] for number in outputs]
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
    """The same, with the equations of jitted functions in the place of their calls."""

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
    """Adds what the equations compute to the values of their variables."""
    for equation in equations:
        inputs = [_read(values, atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _results(equation, inputs), strict=True))


def _results(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    if equation.primitive.name == "jit":
        return _call(equation.params["jaxpr"], inputs)
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*inputs, **params)
    return results if equation.primitive.multiple_results else [results]


def _read(values: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
