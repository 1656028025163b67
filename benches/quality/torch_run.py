"""A whole run of one of PyTorch's methods: one worker of a job, as `train` is."""

import os
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import tyro

from benches.quality.torch_gpt import TorchTrainer
from train.cli.changes import with_fields
from train.cli.load import load_config
from train.cli.read import from_options
from train.store.log import METRICS, line_of


def run(
    config: Annotated[Path, tyro.conf.Positional],
    wrapper: str,
    fields: tuple[str, ...],
    straggler: float,
    run_dir: Path,
) -> None:
    """Trains, and writes rows as `train` does.

    Args:
      config: config file.
      wrapper: see `ComparedMethod.torch`.
      fields: fields of the config and their values, in turn.
      straggler: seconds by which worker t mod N is late at step t.
      run_dir: folder of the rows.
    """
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    options = load_config(config)
    for field, value in zip(fields[::2], fields[1::2], strict=True):
        options = with_fields(options, {field: value})
    trainer = TorchTrainer(options, wrapper)
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / METRICS).open("w", buffering=1) as file:

        def write(**row: object) -> None:
            if rank == 0:
                seconds = time.monotonic() - began
                file.write(line_of({"seconds": seconds, **row}))

        began = start = time.monotonic()
        for step in range(1, options.num_steps + 1):
            if straggler and (step - 1) % num_workers == rank:
                time.sleep(straggler)
            loss = trainer.step()
            if step % options.log.every_steps == 0:
                seconds = (time.monotonic() - start) / options.log.every_steps
                write(step=step, loss=loss, steps_per_second=1 / seconds)
                start = time.monotonic()
            if step % options.evaluation.every_steps == 0:
                mean, of_workers = trainer.bits_per_byte()
                workers = [{"bits_per_byte": loss} for loss in of_workers]
                write(step=step, mean_model={"bits_per_byte": mean}, workers=workers)
                start = time.monotonic()
    os._exit(0)  # Decent-DP's threads do not end.


if __name__ == "__main__":
    from_options(run)
