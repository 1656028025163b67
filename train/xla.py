"""Options of XLA: the recommended ones, and how arguments are read."""

from collections.abc import Mapping, Sequence

import jax

PLATFORMS = ("cpu", "gpu", "tpu")

# Without a GPU there is nothing to tune kernels on.
COMPILE_ONLY = {"xla_gpu_autotune_level": "0"}

THRESHOLDS = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_collective_permute_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)

ALL_REDUCE_THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes"

# A config may be that of another's run, and is to name no program.
PROGRAMS = (
    "xla_backend_extra_options",  # LLVM's, which loads plugins.
    "xla_gpu_cuda_data_dir",  # The folder of ptxas, which XLA starts.
    "xla_gpu_kernel_cache_file",
    "xla_gpu_llvm_ir_file",
    "xla_gpu_ptx_file",
)

# XLA combines messages up to 30 MB and more. Then little compute is left beside the
# last ones, and the 22 MB of a pair become one message that blocks; shown by `decentjax
# preflight configs/timeline.py --exchange in_step --target h100 --nodes 16
# --gpus-per-node 8` without options.
RECOMMENDED = dict.fromkeys(THRESHOLDS, "2500000")


def as_arguments(options: Mapping[str, str | bool | bytes]) -> str:
    """Returns options as the config's `step.xla_options` takes them."""
    return " ".join(f"{name}={value}" for name, value in options.items())


def read_options(arguments: Sequence[str], platform: str) -> dict[str, str]:
    """Reads "recommended", and options of the form NAME=VALUE.

    Args:
      arguments: `step.xla_options` of the config.
      platform: "cpu", "gpu" or "tpu"; options of another platform, such as xla_gpu_...,
        are left out, so that one config serves all.

    Raises:
      ValueError: if an argument has another form, or names a program.
    """
    options = _given(arguments)
    if "recommended" in arguments:
        options = {**RECOMMENDED, **options}
    others = tuple(f"xla_{other}_" for other in PLATFORMS if other != platform)
    return {
        name: value for name, value in options.items() if not name.startswith(others)
    }


def check_options(arguments: Sequence[str], platform: str) -> None:
    """Checks options by compiling an empty program with them.

    On CPU and GPU XLA knows the options of both. TPU options can be checked only on a
    TPU, which knows no others; unchecked options pass.

    Args:
      arguments: `step.xla_options` of the config; the recommended ones are known.
      platform: platform of the job.

    Raises:
      ValueError: if XLA does not know an option, or cannot read its value.
    """
    unknown = ("xla_cpu_", "xla_gpu_") if platform == "tpu" else "xla_tpu_"
    options = {
        name: value
        for name, value in _given(arguments).items()
        if not name.startswith(unknown)
    }
    if not options:
        return

    def nothing() -> int:  # A name, which tells its dump by XLA from those of steps.
        return 0

    try:
        jax.jit(nothing, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).removeprefix("INVALID_ARGUMENT: ")
        raise ValueError(f"step.xla_options: {reason}") from error


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """The options other than "recommended"."""
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
        if name in PROGRAMS:
            raise ValueError(
                f"step.xla_options has {name}, which names a program to run: set it in "
                "the variable XLA_FLAGS"
            )
        options[name] = value
    return options
