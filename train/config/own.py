"""Own functions of the number of workers: a graph, or a method as a plan."""

from collections.abc import Callable

from decentjax.plan import Plan, policy_of
from train.fields import place_of

Make = Callable[[int], Plan]


def build_plan(make: Make, num_workers: int) -> Plan:
    """Returns the plan of an own function.

    Raises:
      ValueError: if it raises an error, returns no plan, one that does not hash, one of
        another number of workers, or a policy that measures, which the program would
        never show a dispersion.
    """
    made = call_own(make, "method", num_workers)
    if not isinstance(made, Plan):
        wanted = "a Topology, a Policy, Rounds, or methods.all_reduce(num_workers)"
    elif made.num_workers != num_workers:
        wanted, made = f"a plan of {num_workers} workers", f"one of {made.num_workers}"
    elif not _hashes(made):
        wanted = "a plan that hashes, of numbers, tuples and functions, without arrays"
    elif (policy := policy_of(made)) is not None and policy.measures:
        wanted = "a policy of the step alone, as --policy holding is one that measures"
        made = policy.name
    else:
        return made
    raise ValueError(f"method = {place_of(make)} must return {wanted}, got {made}")


def call_own(
    make: Callable, field: str, count: int, of: str = "the number of workers"
) -> object:
    """Returns what an own function of a field makes of the count of something.

    Raises:
      ValueError: if it raises an error.
    """
    try:
        return make(count)
    except Exception as error:
        raise ValueError(
            f"{field} = {place_of(make)} must take {of}, and raises for {count}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _hashes(plan: Plan) -> bool:
    try:
        hash(plan)
    except TypeError:
        return False
    return True
