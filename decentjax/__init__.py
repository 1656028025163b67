"""decentjax: decentralized training for JAX.

`x_i <- sum_j W_ij x_j + update(grad f_i(x_i))`: each worker averages its model with a
few neighbours while it computes its gradient, and waits for no other worker.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0"

if TYPE_CHECKING:
    from decentjax import (
        analysis,
        codec,
        compression,
        distributed,
        exchange,
        gossip,
        methods,
        mixing,
        optim,
        overlap,
        placement,
        policy,
        rounds,
        runtime,
        topology,
        updates,
    )
    from decentjax.exchange import Topology
    from decentjax.mixing import consensus_distance, mix
    from decentjax.optim import decentralize
    from decentjax.placement import (
        AXIS,
        mean_model,
        over_workers,
        place,
        stack,
        worker_mesh,
    )
    from decentjax.plan import init_state
    from decentjax.rounds import Rounds
    from decentjax.state import WorkerState, map_params
    from decentjax.train_step import TrainStep, on_mesh, simulate
    from decentjax.updates import LocalUpdate, cast_compute, local_update
    from decentjax.wrapping import WrappedStep, wrap

__all__ = [
    "AXIS",
    "LocalUpdate",
    "Rounds",
    "Topology",
    "TrainStep",
    "WorkerState",
    "WrappedStep",
    "analysis",
    "cast_compute",
    "codec",
    "compression",
    "consensus_distance",
    "decentralize",
    "distributed",
    "exchange",
    "gossip",
    "init_state",
    "local_update",
    "map_params",
    "mean_model",
    "methods",
    "mix",
    "mixing",
    "on_mesh",
    "optim",
    "over_workers",
    "overlap",
    "place",
    "placement",
    "policy",
    "rounds",
    "runtime",
    "simulate",
    "stack",
    "topology",
    "updates",
    "worker_mesh",
    "wrap",
]

# What to write for names of version 0.3, until the next version.
_GONE = {
    "adapt": "local_update(loss_fn, optimizer)",
    "all_reduce_step": "simulate(local, methods.all_reduce(num_workers))",
    "atc_step": "simulate(local, Rounds(topology))",
    "awc_step": "simulate(local, topology)",
    "compute_in": "cast_compute(loss_fn, dtype)",
    "decentralize_atc": "decentralize(optimizer, Rounds(topology), axis_name)",
    "decentralize_rounds": "decentralize(optimizer, rounds, axis_name)",
    "init_rounds": "init_state(params, optimizer, key, rounds)",
    "round_step": "simulate(local, rounds)",
}
_MOVED = {
    "exchange": "Exchange Groups Permutations",
    "mixing": "Lowering global_mean neighbor_allgather",
    "optim": "accum_adam accum_adamw exact_diffusion quasi_global_momentum "
    "scale_by_accum_adam",
    "placement": "check_one_model local_workers name_workers stacked_shardings",
    "plan": "GradientMean Plan",
    "updates": "Gradient LossFn",
}
_GONE |= {
    name: f"{module}.{name}"
    for module, names in _MOVED.items()
    for name in names.split()
}
# The modules of the core, each before those that import it; the first do not need jax.
_CORE = (
    "exchange",
    "state",
    "mixing",
    "placement",
    "updates",
    "rounds",
    "plan",
    "train_step",
    "optim",
    "wrapping",
)


def __getattr__(name: str) -> Any:
    """Imports the module of a public name when the name is first used.

    So `decentjax.topology` neither needs jax nor waits for its import.
    """
    if name in _GONE:  # Python would drop the text of another error.
        raise ImportError(f"{__name__}.{name} is gone: write {_GONE[name]}")
    if name not in __all__:
        text = f"module {__name__!r} has no attribute {name!r}"
        # Python then adds what may be meant.
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    if importlib.util.find_spec(f"{__name__}.{name}"):
        return _import(name)
    module = next(x for x in map(_import, _CORE) if hasattr(x, name))
    return globals().setdefault(name, getattr(module, name))


def _import(module: str) -> Any:
    return importlib.import_module(f"{__name__}.{module}")


def __dir__() -> list[str]:
    return ["__version__", *__all__]
