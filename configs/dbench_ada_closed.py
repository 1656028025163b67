"""Digits, 64 workers: Ada in a closed loop, which holds a dispersion.

Command: `decentjax train configs/dbench_ada_closed.py`; beside the others, as in
dbench_digits.py, where the results are.
"""

import dataclasses

from configs.dbench_digits import config as ring

config = dataclasses.replace(
    ring,
    name="dbench_ada_closed",
    policy=dataclasses.replace(ring.policy, name="holding"),
)
