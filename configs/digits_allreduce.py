"""Handwritten digits, 32 workers: Adam, all-reduce of the gradients.

Command, hardware and results: as in digits_accumadam_aer.py.
"""

import dataclasses

from configs.digits_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="digits_allreduce",
    step=dataclasses.replace(accumadam_aer.step, algorithm="all_reduce"),
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
    optimizer=dataclasses.replace(accumadam_aer.optimizer, name="adamw"),
)
