"""Number words into German, 16 workers: DAdam, complete graph.

Command, hardware and results: as in numbers_accumadam_aer.py.
"""

import dataclasses

from configs.numbers_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="numbers_dadam_complete",
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
    optimizer=dataclasses.replace(accumadam_aer.optimizer, name="adamw"),
)
