"""Checks that the configs of the models share."""

from typing import Any, Literal

Implementation = Literal["auto", "xla", "cudnn"]


MOST_LAYERS = 1024  # Each is traced for itself.
MOST_EXAMPLES = 2**20  # Of an evaluation, which has them in memory.


def check_positive(config: Any, *names: str, most: int | None = None) -> None:
    """Raises a ValueError if one of these fields is less than 1, or more than most."""
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
        if most is not None and value > most:
            raise ValueError(f"{name} must be at most {most:,}, got {value:,}")


def check_transformer(config: Any, *names: str) -> None:
    """Raises a ValueError if the sizes of a GPT or a Transformer are impossible.

    Args:
      config: its config.
      names: names of the sizes that must be positive.
    """
    check_positive(config, *names)
    check_positive(config, "num_layers", most=MOST_LAYERS)
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {config.dropout}")
    if config.width % config.num_heads:
        raise ValueError(
            f"width = {config.width} must be a multiple of num_heads, "
            f"got {config.num_heads}"
        )
    # cuDNN has no kernel for float32.
    if config.attention == "cudnn" and config.compute_dtype != "bfloat16":
        raise ValueError(
            'attention = "cudnn" needs compute_dtype = "bfloat16", '
            f"got {config.compute_dtype}"
        )
