"""Digits, 64 workers: DSGD-AC, a mixing factor that falls with the rate.

Command: `python -m train configs/dbench_ada_damping.py`
"""

import dataclasses

from configs.wagma_digits_dpsgd import config as ring
from train.config import PolicyConfig

config = dataclasses.replace(
    ring,
    name="dbench_ada_damping",
    policy=PolicyConfig(name="damping", power=1.0),
)
