"""The quickstart with DAdam: the moments move at every step."""

import dataclasses

from configs.quickstart import config as quickstart

config = dataclasses.replace(
    quickstart,
    name="quickstart_dadam",
    optimizer=dataclasses.replace(quickstart.optimizer, name="adamw"),
)
