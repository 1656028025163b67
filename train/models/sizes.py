"""Checks that the configs of the models share."""

from typing import Any, Literal

Implementation = Literal["auto", "xla", "cudnn"]


def check_positive(config: Any, *names: str) -> None:
    """Raises a ValueError if one of these fields is less than 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")


def check_sizes(config: Any, *names: str) -> None:
    """Raises a ValueError if a size is not positive, or dropout no probability."""
    check_positive(config, *names)
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {config.dropout}")


def check_attention(implementation: Implementation, compute_dtype: str) -> None:
    """Raises a ValueError if cuDNN's kernel is to compute in float32: it cannot."""
    if implementation == "cudnn" and compute_dtype != "bfloat16":
        raise ValueError(
            f'attention = "cudnn" needs compute_dtype = "bfloat16", got {compute_dtype}'
        )
