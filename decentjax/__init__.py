"""decentjax: decentralized training for JAX.

`x_i <- sum_j W_ij x_j + update(grad f_i(x_i))`: each worker averages its model with a
few neighbours while it computes its gradient, and waits for nobody else.
"""

from decentjax import analysis, gossip, overlap, runtime, topology
from decentjax.exchange import Exchange, Groups, Permutations, Topology
from decentjax.mixing import Lowering, consensus_distance, global_mean, mix
from decentjax.optim import (
    DecentralizeState,
    ScaleByAccumAdamState,
    accum_adam,
    accum_adamw,
    dadam,
    dadamw,
    decentralize,
    scale_by_accum_adam,
)
from decentjax.placement import (
    TrainStep,
    local_workers,
    mean_model,
    on_mesh,
    over_workers,
    place,
    simulate,
    worker_mesh,
)
from decentjax.step import (
    AXIS,
    LossFn,
    WorkerState,
    adapt,
    all_reduce_step,
    atc_step,
    awc_step,
    compute_in,
    init_state,
)

__version__ = "0.1.0"

__all__ = [
    "AXIS",
    "DecentralizeState",
    "Exchange",
    "Groups",
    "LossFn",
    "Lowering",
    "Permutations",
    "ScaleByAccumAdamState",
    "Topology",
    "TrainStep",
    "WorkerState",
    "accum_adam",
    "accum_adamw",
    "adapt",
    "all_reduce_step",
    "analysis",
    "atc_step",
    "awc_step",
    "compute_in",
    "consensus_distance",
    "dadam",
    "dadamw",
    "decentralize",
    "global_mean",
    "gossip",
    "init_state",
    "local_workers",
    "mean_model",
    "mix",
    "on_mesh",
    "over_workers",
    "overlap",
    "place",
    "runtime",
    "scale_by_accum_adam",
    "simulate",
    "topology",
    "worker_mesh",
]
