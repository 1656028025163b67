"""Options of XLA: those that the trainer takes by default, and their arguments."""

from collections.abc import Mapping, Sequence

import jax

PLATFORMS = ("cpu", "gpu", "tpu")

# Kernels are not tuned where there is no GPU.
COMPILE_ONLY = {"xla_gpu_autotune_level": "0"}

THRESHOLDS = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_collective_permute_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)

ALL_REDUCE_THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes"

# XLA joins messages up to 30 MB and more. Then the last ones have too little beside
# them, and the 22 MB of a pair become one message that blocks, as `python -m
# train.preflight configs/timeline.py --exchange.where in_step --target h100 --nodes 16
# --gpus-per-node 8` shows where it tries no option.
RECOMMENDED = dict.fromkeys(THRESHOLDS, "2500000")


def as_arguments(options: Mapping[str, str | bool | bytes]) -> str:
    """Returns options as the config's `step.xla_options` takes them."""
    return " ".join(f"{name}={value}" for name, value in options.items())


def read_options(arguments: Sequence[str], platform: str) -> dict[str, str]:
    """Reads "recommended", and options of the form NAME=VALUE.

    Args:
      arguments: as in the config.
      platform: "cpu", "gpu" or "tpu"; options of another, xla_gpu_... for a GPU, are
        left out, so that one config serves all.

    Raises:
      ValueError: if one has another form.
    """
    options = _given(arguments)
    if "recommended" in arguments:
        options = {**RECOMMENDED, **options}
    others = tuple(f"xla_{other}_" for other in PLATFORMS if other != platform)
    return {
        name: value for name, value in options.items() if not name.startswith(others)
    }


def check_options(arguments: Sequence[str], platform: str) -> None:
    """Compiles a program of nothing with options, whatever the job compiles.

    On CPU and GPU XLA knows the options of both. Those of TPUs can be checked on a TPU
    alone, and there no others; they pass.

    Args:
      arguments: as in the config; those recommended are known.
      platform: that the job is on.

    Raises:
      ValueError: if XLA does not know one, or cannot read its value.
    """
    unknown = ("xla_cpu_", "xla_gpu_") if platform == "tpu" else "xla_tpu_"
    options = {
        name: value
        for name, value in _given(arguments).items()
        if not name.startswith(unknown)
    }
    if not options:
        return

    def nothing() -> int:
        return 0

    try:
        jax.jit(nothing, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).removeprefix("INVALID_ARGUMENT: ")
        raise ValueError(f"step.xla_options: {reason}") from error


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """The options that are spelled out."""
    options = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if argument == "recommended":
            continue
        if not separator or not name.startswith("xla_"):
            raise ValueError(
                'step.xla_options takes "recommended" and xla_NAME=VALUE, '
                f"got {argument!r}"
            )
        options[name] = value
    return options
