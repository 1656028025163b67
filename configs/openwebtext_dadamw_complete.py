"""OpenWebText, GPT-2 small: DAdamW, complete graph.

Data and command: as in openwebtext_accumadamw_aer.py.
Paper: no result.
Ours: not measured; neither the data nor GPUs were available.

The paper does not say DAdamW's hyperparameters here; these are AccumAdamW's.
"""

import dataclasses

from configs.openwebtext_accumadamw_aer import config as accumadamw_aer

config = dataclasses.replace(
    accumadamw_aer,
    name="openwebtext_dadamw_complete",
    topology=dataclasses.replace(accumadamw_aer.topology, name="complete"),
    optimizer=dataclasses.replace(accumadamw_aer.optimizer, name="adamw"),
)
