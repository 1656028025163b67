"""Digits, 64 workers: DSGD-AC, a mixing factor that falls with the rate.

Command: `decentjax train configs/dbench_ada_damping.py`; beside the others, as in
dbench_digits.py, where the results are.
"""

import dataclasses

from configs.dbench_digits import config as ring

config = dataclasses.replace(
    ring,
    name="dbench_ada_damping",
    policy=dataclasses.replace(ring.policy, name="damping"),
)
