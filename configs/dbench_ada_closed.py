"""Digits, 64 workers: Ada in a closed loop, which holds a dispersion.

Command: `python -m train configs/dbench_ada_closed.py`
"""

import dataclasses

from configs.wagma_digits_dpsgd import config as ring
from train.config import PolicyConfig

config = dataclasses.replace(
    ring,
    name="dbench_ada_closed",
    policy=PolicyConfig(name="holding", target=0.01),
)
