"""OpenWebText, GPT-2 small: AdamW, all-reduce of the gradients.

Data and command: as in openwebtext_accumadamw_aer.py.
Paper: held-out loss 2.846.
Ours: not measured; neither the data nor GPUs were available.
"""

import dataclasses

from configs.openwebtext_accumadamw_aer import config as accumadamw_aer

config = dataclasses.replace(
    accumadamw_aer,
    name="openwebtext_allreduce",
    step=dataclasses.replace(accumadamw_aer.step, algorithm="all_reduce"),
    topology=dataclasses.replace(accumadamw_aer.topology, name="complete"),
    optimizer=dataclasses.replace(accumadamw_aer.optimizer, name="adamw", b2=0.95),
)
