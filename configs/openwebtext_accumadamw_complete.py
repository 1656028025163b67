"""OpenWebText, GPT-2 small: AccumAdamW, complete graph.

Data and command: as in openwebtext_accumadamw_aer.py.
Paper: no result.
Ours: not measured; neither the data nor GPUs were available.
"""

import dataclasses

from configs.openwebtext_accumadamw_aer import config as accumadamw_aer

config = dataclasses.replace(
    accumadamw_aer,
    name="openwebtext_accumadamw_complete",
    topology=dataclasses.replace(accumadamw_aer.topology, name="complete"),
)
