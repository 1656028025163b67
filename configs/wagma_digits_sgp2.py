"""Handwritten digits, 64 workers: SGP with two peers.

Command, hardware and results: as in wagma_digits.py.
"""

import dataclasses

from configs.wagma_digits import config as wagma

config = dataclasses.replace(
    wagma,
    name="wagma_digits_sgp2",
    topology=dataclasses.replace(
        wagma.topology, name="k_peer_exponential", degree=2, mean_every=None
    ),
    optimizer=dataclasses.replace(wagma.optimizer, learning_rate=0.3),
)
