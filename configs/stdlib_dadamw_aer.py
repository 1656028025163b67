"""The standard library, 16 workers: DAdamW, alternating exponential ring.

Command, hardware and results: as in stdlib_accumadamw_aer.py.
"""

import dataclasses

from configs.stdlib_accumadamw_aer import config as accumadamw_aer

config = dataclasses.replace(
    accumadamw_aer,
    name="stdlib_dadamw_aer",
    optimizer=dataclasses.replace(accumadamw_aer.optimizer, name="adamw"),
)
