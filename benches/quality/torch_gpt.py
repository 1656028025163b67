"""The GPT of `train.models.gpt` in PyTorch, trained by DDP or Decent-DP.

It starts from the same parameters as the config's run in jax, and reads the same
batches, so that both have the same losses where the methods are the same.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from train.config import Config, OptimizerConfig
from train.data.batches import feed
from train.models.gpt import GPTConfig
from train.run.build import build_steps
from train.run.optimizers import build_schedule
from train.run.setup import make_run
from train.tasks.stdlib import StdlibTask
from train.tasks.task import Task

FIRST_STEPS = 10  # Before PowerSGD's hook begins.
ONE_BUCKET = 1000  # MiB, more than the model has.
LAYER_NORM_EPS = 1e-6  # Of flax.


class TorchGPT(nn.Module):
    """Mean loss of windows [B, T + 1], in nats; parameters as in jax, by their path."""

    def __init__(self, config: GPTConfig, params: dict[str, np.ndarray]):
        super().__init__()
        self.config = config
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(torch.tensor(x)) for name, x in params.items()}
        )

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        tokens, targets = windows[:, :-1], windows[:, 1:]
        embedding = self.weights["tokens_embedding"]
        x = embedding[tokens] + self.weights["positions_embedding"][: tokens.shape[1]]
        for block in range(self.config.num_layers):
            x = x + self._attend(self._norm(x, f"blocks_{block}_attention_norm"), block)
            x = x + self._perceive(self._norm(x, f"blocks_{block}_mlp_norm"), block)
        logits = self._norm(x, "norm") @ embedding.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = self.weights[f"{name}_scale"]
        return functional.layer_norm(x, x.shape[-1:], scale, eps=LAYER_NORM_EPS)

    def _attend(self, x: torch.Tensor, block: int) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)
            for part in (x @ self.weights[f"blocks_{block}_qkv_kernel"]).chunk(3, -1)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).flatten(-2)
        return out @ self.weights[f"blocks_{block}_out_kernel"]

    def _perceive(self, x: torch.Tensor, block: int) -> torch.Tensor:
        hidden = functional.gelu(
            x @ self.weights[f"blocks_{block}_up_kernel"], approximate="tanh"
        )
        return hidden @ self.weights[f"blocks_{block}_down_kernel"]


def named(params: Any) -> dict[str, np.ndarray]:
    """The parameters of `train.models.gpt`, by names as PyTorch takes them."""
    return {
        "_".join(str(key.key) for key in path if hasattr(key, "key")): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(params)
    }


class TorchTrainer:
    """Trains one worker of a config, in a process group of all.

    Args:
      config: config of the run.
      wrapper: see `ComparedMethod.torch`.
    """

    def __init__(self, config: Config, wrapper: str):
        assert isinstance(config.task, StdlibTask)
        self._task: Task = config.task.build()
        self._batches = _batches(config, self._task)
        key, _ = jax.random.split(jax.random.key(config.seed))
        params, _ = jax.jit(self._task.init)(key)
        self._plain = TorchGPT(config.task.model, named(params))
        self._clip = config.optimizer.clip_norm
        schedule = jax.jit(build_schedule(config.optimizer, config.num_steps))
        make = functools.partial(_adamw, config.optimizer)
        decay = functools.partial(
            torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: float(schedule(t))
        )
        self._decentralized = wrapper == "decent_dp"
        if self._decentralized:
            # Imported here, as the other methods do without it.
            from decent_dp.ddp import DecentralizedDataParallel

            # It steps its optimizers itself, in hooks of the backward pass.
            self._model: nn.Module = DecentralizedDataParallel(
                self._plain,
                lambda params: make([x for _, x in params]),
                lr_scheduler_fn=decay,
                topology="ring",
                grad_clip_norm=self._clip or 0.0,
            )
            return
        hook, _, rank = wrapper.partition(" ")
        # With gloo the callbacks of PowerSGD's buckets run in another order on each
        # worker, and their messages would meet: it gets a single bucket.
        bucket = ONE_BUCKET if hook == "powersgd" else None
        ddp = DistributedDataParallel(self._plain, bucket_cap_mb=bucket)
        if hook == "fp16":
            ddp.register_comm_hook(None, fp16_compress_hook)
        elif hook == "powersgd":
            state = PowerSGDState(None, int(rank), FIRST_STEPS)
            ddp.register_comm_hook(state, powerSGD_hook)
        self._model = ddp
        self._optimizer = make(list(self._plain.parameters()))
        self._schedule = decay(self._optimizer)

    def step(self) -> float:
        """Takes a step, and returns this worker's loss."""
        loss = self._model(next(self._batches))
        loss.backward()
        if not self._decentralized:
            if self._clip is not None:
                nn.utils.clip_grad_norm_(self._plain.parameters(), self._clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._schedule.step()
        return loss.item()

    @torch.no_grad()
    def bits_per_byte(self) -> tuple[float, list[float]]:
        """Held-out losses of the mean model, and of each worker's; a collective."""
        of_workers = [0.0] * dist.get_world_size()
        dist.all_gather_object(of_workers, self._held_out())
        own = [x.clone() for x in self._plain.parameters()]
        for x in self._plain.parameters():
            dist.all_reduce(x)
            x /= dist.get_world_size()
        mean = self._held_out()
        for x, value in zip(self._plain.parameters(), own, strict=True):
            x.copy_(value)
        return mean, of_workers

    def _held_out(self) -> float:
        losses = [
            self._plain(torch.from_numpy(np.asarray(rows, np.int64))).item()
            for rows in self._task.validation()
        ]
        return float(np.mean(losses)) / math.log(2)


def _batches(config: Config, task: Task) -> Iterator[torch.Tensor]:
    for batch in feed(build_steps(make_run(config, task=task), [dist.get_rank()])):
        yield torch.from_numpy(np.asarray(batch.arrays[0], np.int64))


def _adamw(config: OptimizerConfig, params: list[torch.Tensor]) -> torch.optim.AdamW:
    groups = [
        {"params": [x for x in params if x.ndim < 2], "weight_decay": 0.0},
        {"params": [x for x in params if x.ndim >= 2]},
    ]
    betas, decay = (config.b1, config.b2), config.weight_decay
    # The schedule multiplies the rate.
    return torch.optim.AdamW(
        groups, lr=1.0, betas=betas, eps=config.eps, weight_decay=decay
    )
