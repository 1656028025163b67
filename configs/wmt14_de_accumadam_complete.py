"""WMT14 English to German, Transformer base: AccumAdam, complete graph.

Data and command: as in wmt14_de_accumadam_aer.py.
Paper: 27.80 ± 0.34 / 0.5474 BLEU / METEOR (Table 2, 16 workers).
Ours: not measured; neither the data nor GPUs were available.
"""

import dataclasses

from configs.wmt14_de_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="wmt14_de_accumadam_complete",
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
)
