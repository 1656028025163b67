"""The standard library, 16 workers: AccumAdamW, complete graph.

Command, hardware and results: as in stdlib_accumadamw_aer.py.
"""

import dataclasses

from configs.stdlib_accumadamw_aer import config as accumadamw_aer

config = dataclasses.replace(
    accumadamw_aer,
    name="stdlib_accumadamw_complete",
    topology=dataclasses.replace(accumadamw_aer.topology, name="complete"),
)
