"""The processes of a job: discovery, start and joint termination.

`initialize` needs no argument under `decentjax launch`, Slurm, Open MPI and torchrun,
nor in a script run on its own.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decentjax.distributed.start import (
        Peer,
        initialize,
        initialize_peer,
        initialize_worker,
    )
    from decentjax.process.phases import phase

__all__ = ["Peer", "initialize", "initialize_peer", "initialize_worker", "phase"]


def __getattr__(name: str) -> Any:
    # A launcher imports `place` and forks, which jax's threads do not allow.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = "decentjax.process.phases" if name == "phase" else f"{__name__}.start"
    return getattr(importlib.import_module(place), name)
