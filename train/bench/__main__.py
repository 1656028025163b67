"""Speed, side by side: `python -m train.bench {race,gpu,step,data,model}`."""

import importlib
import sys

import tyro

from train.cli import command, show_usage

# Each a file, with the class of its options. What one needs, the others may do without.
BENCHES = {
    "race": "Race",
    "gpu": "GpuBench",
    "step": "StepBench",
    "data": "DataBench",
    "model": "ModelBench",
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
    module = importlib.import_module(f"train.bench.{name}")
    kind = getattr(module, BENCHES[name])
    bench = tyro.cli(kind, prog=f"python -m train.bench {name}", args=options)
    return module.main(bench)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
