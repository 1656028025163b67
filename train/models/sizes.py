"""Checks that the configs of the models share."""

from typing import Any, Literal

Implementation = Literal["auto", "xla", "cudnn"]


def check_positive(config: Any, *names: str) -> None:
    """Raises a ValueError if one of these fields is less than 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")


def check_transformer(config: Any, *names: str) -> None:
    """Raises a ValueError if the sizes of a GPT or a Transformer are impossible.

    Args:
      config: its config.
      names: names of the sizes that must be positive.
    """
    check_positive(config, *names)
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
