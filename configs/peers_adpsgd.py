"""Handwritten digits, 64 workers: AD-PSGD, swaps in random pairs that wait for nobody.

The learning rate is that of D-PSGD, `wagma_digits_dpsgd.py`.

Command: `decentjax launch --processes 4 configs/peers_adpsgd.py`
"""

import dataclasses

from configs.wagma_digits_dpsgd import config as dpsgd
from train.config import ExchangeConfig

config = dataclasses.replace(
    dpsgd,
    name="peers_adpsgd",
    topology=dataclasses.replace(dpsgd.topology, name="random_matching", period=64),
    exchange=ExchangeConfig(where="peers", way="swaps"),
)
