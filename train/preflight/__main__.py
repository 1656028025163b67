"""Compiles a run for a cluster that need not exist, and reports overlap and memory.

`decentjax preflight CONFIG.py --target h100 --nodes 16 --gpus-per-node 8`
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import jax
import tyro

from train.cli.command import command, show_usage
from train.cli.load import load_config
from train.cli.options import AS_OPTIONS, ConfigArgument
from train.cli.plugins import reveal_cuda_plugin
from train.cli.read import from_options
from train.cli.sections import ExchangeName, MethodName, name_of, take_sections
from train.preflight.compile import prepare
from train.preflight.preflight_report import PreflightFlags, report


@command()
def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        show_usage(
            "usage: decentjax preflight CONFIG.py --target TARGET --nodes N "
            "--gpus-per-node L [--field value ...]\n\n"
            "Compiles the config's step for a cluster, and reports overlap and memory."
            "\ndecentjax preflight CONFIG.py --help lists all options."
            "\n\nexample:\n  decentjax preflight quickstart --target h100 --nodes 2 "
            "--gpus-per-node 4",
            arguments,
        )
    path = Path(arguments[0])
    try:
        default, options = take_sections(load_config(path), arguments[1:])
        method = name_of(default.method)

        def run(
            flags: Annotated[PreflightFlags, tyro.conf.arg(name="")],
            config: ConfigArgument = default,
            *,
            exchange: ExchangeName = default.exchange.name,
            method: MethodName = method,
        ) -> int:
            """Compiles the config's step for a cluster, and reports overlap and memory.

            Example: `decentjax preflight quickstart --target h100 --nodes 2
            --gpus-per-node 4`.

            Args:
              flags: cluster, and what is reported.
              config: config of the run.
            """
            del exchange, method  # Read above.
            placed = flags.target, flags.nodes, flags.gpus_per_node, flags.between
            return report(prepare(config, *placed), flags)

        prog = f"decentjax preflight {path}"
        return from_options(run, prog=prog, args=options, config=AS_OPTIONS)
    # The compiler refuses: a name of a TPU slice, or an option of XLA, is wrong.
    except jax.errors.JaxRuntimeError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    # The compiler warns for each program that it finds no GPU.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    reveal_cuda_plugin()
    jax.config.update("jax_platforms", "cpu")
    # A compiler without a device reads no program from a cache.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main(sys.argv[1:]))
