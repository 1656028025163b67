"""OpenWebText, GPT-2 small: DAdamW, alternating exponential ring.

Data and command: as in openwebtext_accumadamw_aer.py.
Paper: no result.
Ours: not measured; neither the data nor GPUs were available.

The paper does not say DAdamW's hyperparameters here; these are AccumAdamW's.
"""

import dataclasses

from configs.openwebtext_accumadamw_aer import config as accumadamw_aer

config = dataclasses.replace(
    accumadamw_aer,
    name="openwebtext_dadamw_aer",
    optimizer=dataclasses.replace(accumadamw_aer.optimizer, name="adamw"),
)
