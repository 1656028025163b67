"""A worker of the quality race: PyTorch's methods. Started by a `Team`."""

import os
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benches.quality.compared import ComparedMethod
from benches.quality.torch_gpt import FIRST_STEPS, TorchTrainer
from benches.race.turns import serve
from benches.runner import Runner
from train.cli.load import load_config


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    serve(Connection(0), _runner)
    os._exit(0)  # Decent-DP's threads do not end.


def _runner(configs: Path, method: ComparedMethod) -> Runner:
    trainer = TorchTrainer(load_config(method.path(configs)), method.torch)
    # DDP measures and regroups in its first steps, and PowerSGD begins after some.
    for _ in range(FIRST_STEPS + 2):
        trainer.step()
    return Runner(trainer.step)


if __name__ == "__main__":
    main()
