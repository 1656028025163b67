"""Speed, side by side: `python -m train.bench {race,gpu,step,data,model}`."""

import importlib
import sys

import tyro

from train.cli import command, show_usage

# Module, and the class of its options. What one needs, the others may do without.
BENCHES = {
    "race": ("race.race", "Race"),
    "gpu": ("gpu.gpu", "GpuBench"),
    "step": ("step", "StepBench"),
    "data": ("data", "DataBench"),
    "model": ("model.model", "ModelBench"),
}
USAGE = """usage: python -m train.bench {race,gpu,step,data,model} [--option value ...]
       python -m train.bench NAME --help

  race   step times on emulated clusters, beside PyTorch DDP and Decent-DP
  gpu    a train step on one GPU, without and with the library around it
  step   a step of one worker, beside plain optax
  data   reading batches, beside training with them
  model  predicted step times, beside measured ones"""


@command()
def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in BENCHES:
        show_usage(USAGE, arguments)
    name, *options = arguments
    file, options_class = BENCHES[name]
    module = importlib.import_module(f"train.bench.{file}")
    kind, prog = getattr(module, options_class), f"python -m train.bench {name}"
    return module.main(tyro.cli(kind, prog=prog, args=options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
