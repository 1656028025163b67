"""Train steps that know nothing of workers, decentralized without a change.

    x_i <- sum_j W_ij x_j + (step(x_i) - x_i)

The step is the local update of one worker, and the models are averaged beside it.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import Mesh

from decentjax._core.collectives import is_mixed, sum_dtype
from decentjax._core.dataflow import ends_in_bound, summands
from decentjax._core.lens import Copy, Lens, copies_of_params, default_params, find_lens
from decentjax._core.optimizer_state import check_averageable
from decentjax.optim import ExactDiffusionState
from decentjax.placement import bound_axis, stack
from decentjax.plan import GradientMean, Plan, check_plan, init_carried
from decentjax.rounds import Rounds
from decentjax.state import WorkerState
from decentjax.train_step import on_mesh, simulate
from decentjax.updates import Adapt, check_averages_nothing, check_call, kinds

Order = Literal["beside", "after"]
RunStep = Callable[[Adapt, Any], Any]
"""Maps (local update, plan) to a train step, as `gossip.Background` does."""


class WrappedStep:
    """A train step of all workers, as `wrap` returns it; a context manager.

    Its state is a `WorkerState`, so that all of this library takes it: `params` are the
    stacked params, `opt_state` is the rest of the train state.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import topology, wrap
      >>> def train_step(state, batch):
      ...     return {"params": state["params"] + batch}, batch
      >>> step = wrap(train_step, topology.complete(2))
      >>> state = step.init({"params": jnp.zeros(3)})
      >>> state, _ = step(state, jnp.ones((2, 3)), 0)
      >>> print(step.train_states(state)["params"])
      [[1. 1. 1.]
       [1. 1. 1.]]
    """

    def __init__(
        self,
        train_step: Callable[[Any, Any], tuple[Any, Any]],
        plan: Plan,
        mesh: Mesh | None,
        params: Callable[[Any], Any] | None,
        run: RunStep | None,
        order: Order | None,
    ):
        self._step, self._plan, self._mesh = train_step, plan, mesh
        self._order = order
        self._select = params or default_params
        self._lens: Lens | None = None
        self._copies: list[Copy] = []
        compiled = functools.partial(on_mesh, mesh=mesh) if mesh else simulate
        self._run: Any = (run or compiled)(self.local, plan)

    def init(
        self,
        state: Any,
        key: jax.Array | None = None,
        workers: Sequence[int] | None = None,
    ) -> WorkerState:
        """Returns the state of all workers: the train state on each of them.

        Random keys in it become each worker's own.

        Args:
          state: train state of one worker, as the step takes it. If the workers are
            slices of the mesh, its arrays may already lie on it.
          key: random key for messages that are rounded at random; by default key 0.
          workers: numbers of the workers of this process, where not all of a mesh.

        Raises:
          TypeError: if an optimizer in it averages models itself, or undoes an average.
          ValueError: if no params are found, or its arrays lie on another mesh.
        """
        self._lens = lens = find_lens(self._select, state)
        self._copies = copies_of_params(lens, state, ExactDiffusionState)
        params, rest = lens.split(state)
        check_averages_nothing(rest, "wrap")
        check_averageable(rest)
        key = jax.random.key(0) if key is None else key
        whole = WorkerState(params, rest, (), key, init_carried(self._plan, params))
        return stack(whole, self._plan.num_workers, self._mesh, workers)

    def __call__(self, state: WorkerState, batch: Any, step: int) -> Any:
        """Runs a step; the state's buffers are donated.

        Args:
          state: state of all workers.
          batch: stacked batches, [N, ...]; between peers, the function `read` of
            `gossip.Peers`.
          step: number of the step, a Python int.

        Returns:
          The new state, and the stacked metrics; between peers, the new state, the
          step that follows, and the metrics.
        """
        self._known()
        with _explained():  # Some errors come when the step is lowered.
            return self._run(state, batch, step)

    def lower(self, state: Any, batch: Any, step: int) -> jax.stages.Lowered:
        """Lowers a compiled step; arrays may be shapes, as from `jax.eval_shape`."""
        self._known()
        with _explained():
            return self._run.lower(state, batch, step)

    def train_states(self, state: WorkerState) -> Any:
        """Returns the train states of the workers: one, whose leaves are [N, ...].

        `mean_model` of it is the train state to evaluate and to export.
        """
        return self._known().join(state.params, state.opt_state)

    def with_train_states(self, state: WorkerState, states: Any) -> WorkerState:
        """Returns the state with other train states, as `train_states` returns them.

        For what a client changes between steps on all workers: metrics to reset, a
        learning rate in the optimizer's state. The inverse of `train_states`. An anchor
        of rounds stays: to set other params, call `init`.
        """
        params, rest = self._known().split(states)
        return state._replace(params=params, opt_state=rest)

    def local(
        self, state: WorkerState, batch: Any, mixed: Any
    ) -> tuple[WorkerState, Any]:
        """The local update, for the steps and exchanges of this library."""
        lens = self._known()
        if self._order == "after":
            state = state._replace(params=mixed)
        before = lens.join(state.params, state.opt_state)
        after, metrics = _called(self._step, before, batch, self._check_keeps_averages)
        stepped, rest = lens.split(after)
        params = jax.tree.map(_moved, mixed, stepped, state.params)
        # Messages that are rounded at random take another key in each step.
        key = jax.random.fold_in(state.key, 0)
        return WorkerState(params, rest, (), key, state.extra), metrics

    def _check_keeps_averages(self, program: ClosedJaxpr) -> None:
        """Raises an error for a step that would leave or take back the averages."""
        numbers, plan = self._known().numbers, self._plan
        follows = self._order == "after" or isinstance(plan, Rounds)
        for of, number, where in self._copies:
            is_averaged = follows and number in numbers
            if not is_averaged and summands(program, [of], [number]):
                raise TypeError(
                    f"train_step steps from {where}, a copy of the params, and so "
                    "takes every average of them back: average it too, by "
                    f"params=lambda state: (the params, {where}) and, over a topology, "
                    'order="after"'
                )
        if self._order or _averages_alone(plan):
            return
        if ends_in_bound(program, numbers, numbers):
            raise ValueError(
                "train_step ends with a bound or a scale of the params, such as a "
                "projection, which the params leave if its change is added to the "
                'average: pass order="after" over a topology, for the step to begin '
                'at the average, or order="beside" if they may'
            )

    def _known(self) -> Lens:
        if self._lens is None:
            raise ValueError("call init with a train state first, after a resume too")
        return self._lens

    def settle(self) -> None:
        """Waits for the messages in flight of a thread; before any other collective."""
        if hasattr(self._run, "settle"):
            self._run.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if hasattr(self._run, "__exit__"):  # A thread or peers.
            self._run.__exit__(*error)


def wrap(
    train_step: Callable[[Any, Any], tuple[Any, Any]],
    plan: Plan,
    mesh: Mesh | None = None,
    *,
    params: Callable[[Any], Any] | None = None,
    run: RunStep | None = None,
    order: Order | None = None,
) -> WrappedStep:
    """Decentralizes a train step of one worker that knows nothing of workers.

    Over a topology each worker i adds what its own step has changed to the average:

        x_i <- sum_j W_ij x_j + (step(x_i) - x_i)

    which is the step of `simulate`, but that weight decay is that of the worker's own
    model. Over
    rounds, as of `methods.diloco`, the step is the inner step. The rest of the train
    state (moments, batch statistics, counts, random keys) stays each worker's own, but
    for z of a schedule-free optimizer, which is averaged too: the params are then
    `(params, [z])`.

    Inside the step the workers' axis is mapped by `jax.shard_map` or `jax.vmap`: it
    sees one worker's arrays. Where a worker is a slice of the mesh, they are sharded
    over its other axes as before; leave out `mesh=` of an inner `jax.shard_map`, which
    then takes the slice's mesh from the context.

    Args:
      train_step: `train_step(state, batch) -> (state, metrics)`, jitted or not; the
        state is any pytree of arrays, as flax's `TrainState`, a state of
        `nnx.split((model, optimizer))`, such modules themselves, or a tuple.
      plan: topology whose exchanges are taken in turn, or rounds.
      mesh: mesh of the workers, as in `on_mesh`: each has a device or a slice of it;
        None simulates all workers on one device.
      params: function that selects the params of a state, which are averaged; by
        default its attribute or item `params`, the `nnx.Param`s, or the first item of a
        tuple.
      order: "after" has the step begin at the average of a topology,

            x_i <- step(sum_j W_ij x_j)

        for a step whose last operation has to hold, such as a projection or the float32
        masters of narrow params; the gradient then waits for the messages. None is
        "beside", the equation above, and refuses steps that end with a bound.
      run: function that maps the local update and the plan to a train step, instead of
        a compiled step: `functools.partial(gossip.Background, mesh=mesh)` exchanges in
        a second thread, `functools.partial(gossip.Peers, party=party)` between peers.

    Returns:
      The train step of all workers: `init` takes a train state, the step a stacked
      batch and the number of the step, and `train_states` returns them.

    Raises:
      TypeError: if the step is not a function of state and batch, or the plan is
        neither topology nor rounds; at the first step, if it steps from a copy of the
        params that is not averaged.
      ValueError: if the mesh does not have the workers of the plan, or for an order of
        rounds; at the first step, if the train step averages over workers itself,
        returns another state, or ends with a bound of the params and has no order.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import decentjax
      >>> optimizer = optax.adam(0.1)
      >>> def train_step(state, batch):  # Knows nothing of workers.
      ...     (params, opt_state), (x, y) = state, batch
      ...     loss_fn = lambda w: ((x @ w - y) ** 2).mean()
      ...     loss, grads = jax.value_and_grad(loss_fn)(params)
      ...     updates, opt_state = optimizer.update(grads, opt_state)
      ...     return (optax.apply_updates(params, updates), opt_state), loss
      >>> step = decentjax.wrap(train_step, decentjax.topology.ring(4))
      >>> state = step.init((jnp.zeros(3), optimizer.init(jnp.zeros(3))))
      >>> x = jax.random.normal(jax.random.key(0), (4, 8, 3))
      >>> for t in range(200):
      ...     state, losses = step(state, (x, x.sum(2)), t)
      >>> params, opt_state = decentjax.mean_model(step.train_states(state))
      >>> print(params.round(2))
      [1. 1. 1.]
    """
    check_call(train_step, "train_step", "state", "batch")
    code = getattr(train_step, "__code__", None)
    if getattr(code, "co_qualname", "").startswith("pmap."):
        raise TypeError(
            "train_step is the result of jax.pmap: leave out jax.pmap, as wrap maps "
            "the step over the workers itself"
        )
    check_plan(plan)
    if isinstance(plan, GradientMean):
        raise TypeError(
            "wrap averages models, and all-reduce the gradients inside the train step: "
            "pass a topology or rounds, or average the gradients there by lax.pmean"
        )
    if order not in (None, "beside", "after"):
        raise ValueError(f'order must be "beside" or "after", got {order!r}')
    if order == "after" and isinstance(plan, Rounds):
        raise ValueError(
            'order="after" begins each step at the average of a topology, and rounds '
            "average after their steps: leave it out, or pass a topology"
        )
    return WrappedStep(train_step, plan, mesh, params, run, order)


def _moved(mixed: jax.Array, stepped: jax.Array, before: jax.Array) -> jax.Array:
    """`mixed + (stepped - before)`."""
    # Where nothing was averaged, the step's own result, without rounding.
    if mixed is before or not is_mixed(before):
        return stepped
    dtype = sum_dtype(before)
    change = stepped.astype(dtype) - before.astype(dtype)
    return (mixed.astype(dtype) + change).astype(before.dtype)


def _averages_alone(plan: Plan) -> bool:
    """Whether a plan replaces models by averages of what the steps have made."""
    is_rounds = isinstance(plan, Rounds)
    return is_rounds and not (plan.delay or plan.outer or plan.compression)


def _called(
    step: Callable, state: Any, batch: Any, check: Callable[[ClosedJaxpr], None]
) -> tuple[Any, Any]:
    """Calls the step, once it has been seen to do what it must."""
    # Traced once, to look at what it does and then to run it.
    with _explained():
        traced, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
    _check_result(shapes, state)
    if (axis := bound_axis()) in _axes(traced.jaxpr):
        raise ValueError(
            f'train_step averages over the axis "{axis}" itself, so there would be '
            "nothing left to average: leave out its pmean or psum over the workers, "
            "or the decentralize around its optimizer"
        )
    check(traced)
    outputs = jaxpr_as_fun(traced)(*jax.tree.leaves((state, batch)))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """A context that says what errors of tracing mean for a wrapped step."""
    try:
        yield
    except NameError as error:
        unbound = re.search(r"unbound axis name:? ?'?(\w*)", str(error))
        if unbound is None:
            raise
        raise ValueError(
            f'train_step averages over the axis "{unbound[1]}", of jax.pmap or '
            "jax.vmap, which it does not have here: leave out its pmean or psum, as "
            "wrap averages the models"
        ) from error
    except ValueError as error:
        if not re.search("context mesh|manual ax", str(error).lower()):
            raise
        raise ValueError(
            "train_step names a mesh itself, but inside it is one worker's slice of "
            "the mesh: leave out mesh= of jax.shard_map, give a PartitionSpec instead "
            "of a NamedSharding, and leave out in_shardings and out_shardings of "
            "jax.jit"
        ) from error


def _check_result(result: Any, state: Any) -> None:
    """Raises an error unless the shapes are those of (state, metrics)."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "train_step must return (state, metrics), got "
            + (f"{len(result)} values" if isinstance(result, tuple) else "one value")
        )
    wanted, got = kinds(state), kinds(result[0])
    if wanted != got and wanted == kinds(result[1]):
        raise TypeError(
            "train_step must return (state, metrics), got (metrics, state): "
            "wrap(lambda *args: train_step(*args)[::-1], ...)"
        )
    if wanted != got:
        path = next(x for x in wanted | got if wanted.get(x) != got.get(x))
        raise ValueError(
            f"train_step must return a state like its argument, but state{path} is "
            f"{got.get(path, 'missing')} after it and {wanted.get(path, 'missing')} "
            "before"
        )
    if jax.tree.structure(state) != jax.tree.structure(result[0]):
        raise ValueError(
            "train_step must return a state like its argument, but their static parts "
            f"differ: {jax.tree.structure(state)}, and after it "
            f"{jax.tree.structure(result[0])}"
        )


def _axes(jaxpr: Jaxpr) -> set[Any]:
    """The mapped axes over which a program communicates."""
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name != "axis_index":
            for name in ("axes", "axis_name"):
                axes = equation.params.get(name, ())
                found.update(axes if isinstance(axes, tuple) else (axes,))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                found |= _axes(value if isinstance(value, Jaxpr) else value.jaxpr)
    return found


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)
