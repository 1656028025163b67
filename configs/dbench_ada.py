"""Digits, 64 workers: Ada, a ring lattice that loses two neighbours per epoch.

Command: `decentjax train configs/dbench_ada.py`; beside the others, as in
dbench_digits.py, where the results are.
"""

import dataclasses

from configs.dbench_digits import config as ring

config = dataclasses.replace(
    ring,
    name="dbench_ada",
    policy=dataclasses.replace(ring.policy, name="thinning"),
)
