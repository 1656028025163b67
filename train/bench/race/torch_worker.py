"""A worker of the race: PyTorch's contestants. Started by `train.bench.race.race`."""

import functools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from train.bench.work import Contestant, Work, serve


def main(layers: int, width: int, batch: int, per_node: int, answers: int) -> None:
    del per_node  # Decent-DP reads LOCAL_WORLD_SIZE.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    work = Work(layers=layers, width=width, batch=batch)
    make = functools.partial(_contestant, work)
    serve(answers, dist.get_rank(), dist.get_world_size(), make)
    os._exit(0)  # Decent-DP's threads do not end.


def _contestant(work: Work, name: str) -> Contestant:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(work.layers):
        layers += [nn.Linear(work.width, work.width, bias=False), nn.Tanh()]
    model: nn.Module = nn.Sequential(*layers)
    inputs = torch.randn(work.batch, work.width)
    what, _, topology = name.partition(": ")
    optimizer = None
    if what == "Decent-DP":
        from decent_dp.ddp import DecentralizedDataParallel
        from decent_dp.optim import optim_fn_adam

        adam = functools.partial(optim_fn_adam, lr=1e-4)
        model = DecentralizedDataParallel(model, adam, topology=topology)
    else:
        if what == "PyTorch DDP":
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = (model(inputs) ** 2).mean()
        if optimizer is not None:
            optimizer.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return Contestant(step)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
