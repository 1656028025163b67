"""Number words into German, 16 workers: DAdam, alternating exponential ring.

Command, hardware and results: as in numbers_accumadam_aer.py.
"""

import dataclasses

from configs.numbers_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="numbers_dadam_aer",
    optimizer=dataclasses.replace(accumadam_aer.optimizer, name="adamw"),
)
