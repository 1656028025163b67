"""Where the results of a traced program come from, by its equations (its jaxpr)."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_BOUNDS = {"clamp", "max", "min"} | {
    *("abs", "ceil", "cos", "erf", "exp", "floor", "householder_product"),
    *("integer_pow", "logistic", "round", "rsqrt", "select_n", "sign", "sin", "sort"),
    *("sqrt", "square", "tanh"),
}
_PRODUCTS = {"div", "mul"}
_SUMS = {"add", "add_any", "neg", "sub"}
_SAME = {  # They change neither values nor, but for rounding, their sizes.
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "device_put",
    "optimization_barrier",
    "pvary",
    "reduce_precision",
    "reshape",
    "reshard",
    "select_n",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "transpose",
}
Follow = Callable[[JaxprEqn, set[Var], dict[Var, JaxprEqn]], bool]
"""Whether to go back through an equation, by the variables on the way and their own."""


def copies(program: ClosedJaxpr, inputs: Iterable[int]) -> list[int]:
    """The numbers of the outputs that are inputs, but for dtype and shape."""
    outputs = range(len(program.jaxpr.outvars))
    same = lambda equation, *_: equation.primitive.name in _SAME  # noqa: E731
    return [n for n in outputs if _reached(program, [n], inputs, same)]


def summands(
    program: ClosedJaxpr, outputs: Iterable[int], inputs: Iterable[int]
) -> list[int]:
    """The numbers of the inputs to which the outputs only add something."""
    found = _reached(program, outputs, inputs, _is_added)
    return [n for n, x in enumerate(program.jaxpr.invars) if x in found]


def ends_in_bound(
    program: ClosedJaxpr, outputs: Iterable[int], inputs: Iterable[int]
) -> bool:
    """Whether the last operation on what depends on the inputs is no sum.

    As of a projection: a clip, a maximum, or a division by a norm.
    """
    ends = _ends_of(program, outputs, inputs, _is_scaled)
    last = {x.primitive.name for x in ends if isinstance(x, JaxprEqn)}
    return bool(last & (_BOUNDS | _PRODUCTS))


def _is_added(equation: JaxprEqn, wanted: set[Var], made: dict[Var, JaxprEqn]) -> bool:
    """Whether it adds, or switches by a product, as `optax.MultiSteps` does."""
    if equation.primitive.name != "mul":
        return equation.primitive.name in _SAME | _SUMS
    factors = [
        made[x] for x in _variables(equation.invars) if x in made.keys() - wanted
    ]
    sources: list[Any] = [x.invars[0] for x in factors if x.invars]
    return any(x.aval.dtype == bool for x in sources)


def _is_scaled(equation: JaxprEqn, wanted: set[Var], made: dict[Var, JaxprEqn]) -> bool:
    """Whether it only scales, as a decay of weights, or selects from what was there."""
    del made
    name = equation.primitive.name
    is_wanted = [bool({*_variables([x])} & wanted) for x in equation.invars]
    if name == "select_n":  # Of x > 0, x and 0 the last is new.
        return all(is_wanted) or not is_wanted[0]
    return name in _SAME or (name in _PRODUCTS and sum(is_wanted) == 1)


def _reached(
    program: ClosedJaxpr, outputs: Iterable[int], inputs: Iterable[int], follow: Follow
) -> set[Var]:
    ends = _ends_of(program, outputs, inputs, follow)
    return {x for x in ends if isinstance(x, Var)}


def _ends_of(
    program: ClosedJaxpr, outputs: Iterable[int], inputs: Iterable[int], follow: Follow
) -> Iterator[Var | JaxprEqn]:
    jaxpr = program.jaxpr
    wanted = {jaxpr.invars[n] for n in inputs}
    return _ends(jaxpr, [jaxpr.outvars[n] for n in outputs], wanted, follow)


def _ends(
    jaxpr: Jaxpr, outputs: Sequence[Any], inputs: Collection[Var], follow: Follow
) -> Iterator[Var | JaxprEqn]:
    """The inputs, and the equations that are not followed, on the way back."""
    made = {x: equation for equation in jaxpr.eqns for x in equation.outvars}
    wanted = _dependent(jaxpr, inputs)
    pending, seen = list(outputs), set()
    while pending:
        value = pending.pop()
        if isinstance(value, Literal) or value not in wanted or value in seen:
            continue
        seen.add(value)
        equation = made.get(value)
        if equation is None:
            yield value
        elif called := _called(equation):
            for one in called:
                result = one.outvars[equation.outvars.index(value)]
                # A conditional's first argument, for example, is its own.
                given = dict(zip(one.invars[::-1], equation.invars[::-1], strict=False))
                own = [x for x, of in given.items() if {*_variables([of])} & wanted]
                for end in _ends(one, [result], own, follow):
                    if isinstance(end, Var):
                        pending.append(given[end])
                    else:
                        yield end
        elif follow(equation, wanted, made):
            pending.extend(equation.invars)
        else:
            yield equation


def _dependent(jaxpr: Jaxpr, inputs: Iterable[Var]) -> set[Var]:
    """The variables that depend on the inputs, and these."""
    found = set(inputs)
    for equation in jaxpr.eqns:
        if found.intersection(_variables(equation.invars)):
            found.update(equation.outvars)
    return found


def _called(equation: JaxprEqn) -> list[Jaxpr]:
    """The functions that an equation calls: of jit, conditionals, loops, ..."""
    found = []
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else [value]:
            one = one.jaxpr if isinstance(one, ClosedJaxpr) else one
            if isinstance(one, Jaxpr) and len(one.outvars) == len(equation.outvars):
                found.append(one)
    return found


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
