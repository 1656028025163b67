"""Handwritten digits, 64 workers: methods whose workers wait for no late one.

Command: `decentjax launch --processes 4 peers_wagma`, 16 workers in each of four
processes; and so on. Simulated, with two late workers in each step as in the second
paper: `decentjax compare peers_wagma --clock.compute 390ms --clock.late-workers 2
--clock.late-by 320ms`
"""

import dataclasses

from configs.wagma import wagma_digits, wagma_digits_dpsgd
from train.config import GroupExchange, PeerExchange

# WAGMA-SGD: of a late worker a group takes an older model.
peers_wagma = dataclasses.replace(
    wagma_digits,
    name="peers_wagma",
    exchange=GroupExchange(),
)
# AD-PSGD: swaps in random pairs. The learning rate is that of D-PSGD.
peers_adpsgd = dataclasses.replace(
    wagma_digits_dpsgd,
    name="peers_adpsgd",
    topology=dataclasses.replace(
        wagma_digits_dpsgd.topology, name="random_matching", period=64
    ),
    exchange=PeerExchange(way="swaps"),
)
