"""The methods of the quality race, each a config and, for PyTorch's, a wrapper.

Imports neither jax nor torch, because the workers of both use it.
"""

from pathlib import Path
from typing import NamedTuple

JAX, TORCH = (f"benches.quality.{kind}_quality" for kind in ("jax", "torch"))


SIMULATED, UNLIMITED, LIMITED = "simulated", "without limit", "in each network"


class ComparedMethod(NamedTuple):
    """A method.

    Args:
      name: its name in tables and for `--only`.
      config: name of its config; of a method in PyTorch, the same method's in jax.
      torch: how PyTorch trains it, "ddp", "fp16" or "decent_dp", or PowerSGD with the
        rank of its approximation, such as "powersgd 4"; none in jax.
      losses: where its losses by step come from: SIMULATED, the simulated config;
        UNLIMITED, processes on links without a limit; or LIMITED, processes in each
        network, as that decides what they learn.
      like: name of the config whose best learning rate it takes, where it cannot be
        simulated; else its own.
      tune: fields of its own beside the learning rate, each with its values, as in
        `decentjax compare --tune`; none on which the time of a step depends.
    """

    name: str
    config: str
    torch: str = ""
    losses: str = SIMULATED
    like: str = ""
    tune: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return self.name

    def path(self, configs: Path) -> Path:
        """Its config in a file of those of all methods."""
        return Path(f"{configs}:{self.config}")

    def tuned(self, configs: Path) -> Path:
        """The config whose best values it takes, in a file of those of all methods."""
        return self._replace(config=self.like or self.config).path(configs)

    @property
    def worker(self) -> str:
        """Module of its workers."""
        return TORCH if self.torch else JAX


DADAM, RING = "quality", "quality_ring"
ALONE = ComparedMethod("compute alone", "quality_alone")
ALL_REDUCE = ComparedMethod("all-reduce", "quality_allreduce")
DDP = ComparedMethod("PyTorch DDP", ALL_REDUCE.config, "ddp")
FP16 = ComparedMethod("PyTorch DDP, fp16 hook", ALL_REDUCE.config, "fp16")
POWERSGD = tuple(
    ComparedMethod(
        f"PyTorch DDP, PowerSGD hook, rank {rank}",
        ALL_REDUCE.config,
        f"powersgd {rank}",
        UNLIMITED,
    )
    for rank in (1, 4, 16)
)
OUTER = (
    ("method.learning-rate", "0.35", "0.5", "0.7", "1.0"),
    ("method.momentum", "0.0", "0.2", "0.5", "0.7", "0.9"),
)
SPARSE = (
    ("method.learning-rate", "1.0", "1.5", "2.0", "3.0"),
    ("method.error-kept", "0.9", "0.95", "1.0"),
)
METHODS = (
    DDP,
    FP16,
    *POWERSGD,
    # Its alternating exponential ring fails where a node has one worker.
    ComparedMethod("Decent-DP, ring", RING, "decent_dp"),
    ALL_REDUCE,
    ComparedMethod("DAdamW", DADAM),
    ComparedMethod("DAdamW, ring", RING),
    ComparedMethod("DAdamW, ring, bfloat16", "quality_bf16"),
    ComparedMethod("DAdamW, ring, int8", "quality_ring8"),
    ComparedMethod("AccumAdamW", "quality_accum"),
    ComparedMethod("rounds of 2, int8", "quality_int8"),
    ComparedMethod("rounds of 4, int8", "quality_int8_rare"),
    ComparedMethod("DiLoCo", "quality_diloco", tune=OUTER),
    ComparedMethod("NoLoCo", "quality_noloco", tune=OUTER),
    ComparedMethod("SparseLoCo", "quality_sparse", tune=SPARSE),
    ComparedMethod("WAGMA", "quality_wagma", losses=LIMITED, like=DADAM),
    # They wait longer than any message takes, so no network changes what they learn.
    ComparedMethod("peers", "quality_peers", losses=UNLIMITED, like=DADAM),
)
