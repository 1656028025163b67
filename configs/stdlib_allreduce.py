"""The standard library, 16 workers: AdamW, all-reduce of the gradients.

Command, hardware and results: as in stdlib_accumadamw_aer.py.
"""

import dataclasses

from configs.stdlib_accumadamw_aer import config as accumadamw_aer

config = dataclasses.replace(
    accumadamw_aer,
    name="stdlib_allreduce",
    step=dataclasses.replace(accumadamw_aer.step, algorithm="all_reduce"),
    topology=dataclasses.replace(accumadamw_aer.topology, name="complete"),
    optimizer=dataclasses.replace(accumadamw_aer.optimizer, name="adamw"),
)
