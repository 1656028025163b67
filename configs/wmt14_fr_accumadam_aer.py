"""WMT14 English to French, Transformer big: AccumAdam, alternating exponential ring.

Data: `decentjax prepare wmt14 --pair fr-en --vocabulary 32000 --out
data/wmt14_fr-en`
Command: `srun decentjax train configs/wmt14_fr_accumadam_aer.py
--distributed.enabled`, then `decentjax evaluate runs/wmt14_fr_accumadam_aer`.
Hardware: 16 GPUs, 4 nodes of 4.
Paper: 46.05 ± 0.03 / 0.6715 BLEU / METEOR (Table 2, 16 workers).
Ours: not measured; neither the data nor GPUs were available.

Per step: 16 workers * 1,562 tokens of each side = 25,000; 130,000 steps,
some three passes.
The warm-up is that of the released code, the dropout that of its older configs; the
code's average of all models after each pass is not made here.
"""

import dataclasses

from configs.wmt14_de_accumadam_aer import config as de

model = dataclasses.replace(
    de.task.model, vocabulary=32000, num_heads=16, width=1024, hidden=4096
)
config = dataclasses.replace(
    de,
    name="wmt14_fr_accumadam_aer",
    task=dataclasses.replace(de.task, data="data/wmt14_fr-en", model=model),
)
