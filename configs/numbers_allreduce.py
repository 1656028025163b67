"""Number words into German, 16 workers: Adam, all-reduce of the gradients.

Command, hardware and results: as in numbers_accumadam_aer.py.
"""

import dataclasses

from configs.numbers_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="numbers_allreduce",
    step=dataclasses.replace(accumadam_aer.step, algorithm="all_reduce"),
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
    optimizer=dataclasses.replace(
        accumadam_aer.optimizer, name="adamw", learning_rate=3e-3
    ),
)
