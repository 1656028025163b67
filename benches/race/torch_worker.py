"""A worker of the race: PyTorch's contestants. Started by `benches.race.team`."""

import functools
import os
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from benches.race.contestants import DECENT_DP_GRAPHS, Contestant, Scheme
from benches.race.turns import Load, serve
from benches.runner import Runner


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    serve(Connection(0), _runner)
    os._exit(0)  # Decent-DP's threads do not end.


def _runner(load: Load, contestant: Contestant) -> Runner:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(load.layers):
        layers += [nn.Linear(load.width, load.width, bias=False), nn.Tanh()]
    model: nn.Module = nn.Sequential(*layers)
    inputs = torch.randn(load.batch, load.width)
    optimizer = None
    if contestant.scheme == Scheme.DECENT_DP:
        # Imported here, as the other contestants do without it.
        from decent_dp.ddp import DecentralizedDataParallel
        from decent_dp.optim import optim_fn_adam

        adam = functools.partial(optim_fn_adam, lr=1e-4)
        assert contestant.graph is not None
        topology = DECENT_DP_GRAPHS[contestant.graph]
        # It steps its optimizers itself, in hooks of the backward pass.
        model = DecentralizedDataParallel(model, adam, topology=topology)
    else:
        if contestant.scheme == Scheme.DDP:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = (model(inputs) ** 2).mean()
        if optimizer is not None:
            optimizer.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return Runner(step)


if __name__ == "__main__":
    main()
