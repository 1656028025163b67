"""A hook of a run that makes its workers late in turn."""

import os
import time
from typing import Any

SECONDS = "LATE_SECONDS"


def rotating(step: int, state: Any, metrics: Any) -> None:
    """Sleeps before step t in worker t mod N of an emulated cluster."""
    del state, metrics
    if step % int(os.environ["SLURM_NTASKS"]) == int(os.environ["SLURM_PROCID"]):
        time.sleep(float(os.environ[SECONDS]))
