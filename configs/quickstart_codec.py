"""The quickstart on a graph of single workers, whose messages are encoded.

Command: `decentjax compare configs/quickstart_codec.py --seeds 3
--vary rounds.codec none int8 int4`
Hardware: 2 cores of an AMD EPYC; all workers and seeds simulated on one device.
Result: 2.259 +- 0.012, 2.258 +- 0.020 and 2.454 +- 0.038 held-out bits per byte.
"""

import dataclasses

from configs.quickstart import config as quickstart
from train.config import RoundsConfig, StepConfig, TopologyConfig

config = dataclasses.replace(
    quickstart,
    name="quickstart_codec",
    topology=TopologyConfig(name="one_peer_exponential"),
    step=StepConfig(algorithm="rounds", batch_per_worker=4),
    rounds=RoundsConfig(every_steps=1, delay=1, merge="shift"),
)
