"""WMT14 English to French, Transformer big: AccumAdam, complete graph.

Data and command: as in wmt14_fr_accumadam_aer.py.
Paper: 46.18 ± 0.20 / 0.6704 BLEU / METEOR (Table 2, 16 workers).
Ours: not measured; neither the data nor GPUs were available.
"""

import dataclasses

from configs.wmt14_fr_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="wmt14_fr_accumadam_complete",
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
)
