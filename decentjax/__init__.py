"""decentjax: decentralized training for JAX.

`x_i <- sum_j W_ij x_j + update(grad f_i(x_i))`: each worker averages its model with a
few neighbours while it computes its gradient, and waits for no other worker.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from decentjax import (
        analysis,
        codec,
        compression,
        distributed,
        gossip,
        methods,
        overlap,
        policy,
        rounds,
        runtime,
        topology,
    )
    from decentjax.correction import exact_diffusion, quasi_global_momentum
    from decentjax.exchange import Exchange, Groups, Permutations, Topology
    from decentjax.loss import LossFn, cast_compute
    from decentjax.mixing import (
        Lowering,
        consensus_distance,
        global_mean,
        mix,
        neighbor_allgather,
    )
    from decentjax.optim import (
        accum_adam,
        accum_adamw,
        decentralize,
        scale_by_accum_adam,
    )
    from decentjax.param_map import map_params
    from decentjax.placement import (
        AXIS,
        check_one_model,
        local_workers,
        mean_model,
        name_workers,
        over_workers,
        place,
        worker_mesh,
    )
    from decentjax.plan import GradientMean, Plan, init_state
    from decentjax.rounds import Rounds
    from decentjax.state import (
        WorkerState,
        stack,
        stacked_shardings,
    )
    from decentjax.train_step import TrainStep, on_mesh, simulate
    from decentjax.updates import (
        Gradient,
        LocalUpdate,
        local_update,
    )
    from decentjax.wrapping import WrappedStep, wrap

__all__ = [
    "AXIS",
    "Exchange",
    "Gradient",
    "GradientMean",
    "Groups",
    "LocalUpdate",
    "LossFn",
    "Lowering",
    "Permutations",
    "Plan",
    "Rounds",
    "Topology",
    "TrainStep",
    "WorkerState",
    "WrappedStep",
    "accum_adam",
    "accum_adamw",
    "analysis",
    "cast_compute",
    "check_one_model",
    "codec",
    "compression",
    "consensus_distance",
    "decentralize",
    "distributed",
    "exact_diffusion",
    "global_mean",
    "gossip",
    "init_state",
    "local_update",
    "local_workers",
    "map_params",
    "mean_model",
    "methods",
    "mix",
    "name_workers",
    "neighbor_allgather",
    "on_mesh",
    "over_workers",
    "overlap",
    "place",
    "policy",
    "quasi_global_momentum",
    "rounds",
    "runtime",
    "scale_by_accum_adam",
    "simulate",
    "stack",
    "stacked_shardings",
    "topology",
    "worker_mesh",
    "wrap",
]

_MODULES = (
    "analysis",
    "codec",
    "compression",
    "distributed",
    "gossip",
    "methods",
    "overlap",
    "policy",
    "rounds",
    "runtime",
    "topology",
)
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
# The modules of the core, each before those that import it; the first do not need jax.
_CORE = (
    "exchange",
    "mixing",
    "loss",
    "placement",
    "state",
    "updates",
    "rounds",
    "param_map",
    "plan",
    "train_step",
    "optim",
    "correction",
    "wrapping",
)


def __getattr__(name: str) -> Any:
    """Imports the module of a public name when the name is first used.

    So `decentjax.topology` neither needs jax nor waits for its import.
    """
    if name in _MODULES:
        return _import(name)
    if name in _GONE:  # Python would drop the text of another error.
        raise ImportError(f"{__name__}.{name} is gone: write {_GONE[name]}")
    if name not in __all__:
        text = f"module {__name__!r} has no attribute {name!r}"
        # Python then adds what may be meant.
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    module = next(x for x in map(_import, _CORE) if hasattr(x, name))
    return globals().setdefault(name, getattr(module, name))


def _import(module: str) -> Any:
    return importlib.import_module(f"{__name__}.{module}")


def __dir__() -> list[str]:
    return ["__version__", *__all__]
