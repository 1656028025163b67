"""The processes of a job: how they find each other, start, and end together.

`initialize` needs no argument under `decentjax launch`, Slurm, Open MPI and torchrun,
nor in a script that is run alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decentjax.distributed.start import Peer, initialize, initialize_peer

__all__ = ["Peer", "initialize", "initialize_peer"]


def __getattr__(name: str) -> Any:
    # A launcher reads `place` and forks, which jax's threads do not allow.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.start"), name)
