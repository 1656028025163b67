"""The quickstart with all-reduce: every step averages the gradients of all workers."""

import dataclasses

from configs.quickstart import config as quickstart

config = dataclasses.replace(
    quickstart,
    name="quickstart_allreduce",
    topology=dataclasses.replace(quickstart.topology, name="complete"),
    step=dataclasses.replace(quickstart.step, algorithm="all_reduce"),
    optimizer=dataclasses.replace(quickstart.optimizer, name="adamw"),
)
