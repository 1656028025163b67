"""Digits, 64 workers: a ring, and one mean of all models at the last step.

Command: `decentjax train configs/dbench_ada_merged.py`; beside the others, as in
dbench_digits.py, where the results are.
"""

import dataclasses

from configs.dbench_digits import config as ring

config = dataclasses.replace(
    ring,
    name="dbench_ada_merged",
    policy=dataclasses.replace(ring.policy, name="merged"),
)
