"""A small GPT whose matrices are shared by the two devices of a worker.

`decentjax launch --processes 2 tests/slices.py`
"""

from tests import tiny
from tests.changes import changed
from train.config import TopologyConfig, WorkersConfig


def config_of(devices, where="mesh", num_workers=4, **fields):
    """A small GPT, whose matrices are shared by the devices of a worker."""
    workers = WorkersConfig(
        num_workers=num_workers, devices_per_worker=devices, where=where
    )
    step = changed(tiny.config.step, batch_per_worker=4)
    graph = TopologyConfig(name="one_peer_exponential")
    return changed(
        tiny.config,
        **{
            "workers": workers,
            "step": step,
            "topology": graph,
            "num_steps": 8,
            **fields,
        },
    )


config = config_of(2)
