"""Dtypes that users name."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def float_dtype(name: str, given: DTypeLike) -> np.dtype:
    """Returns a dtype of floats, also of a short name such as "bf16".

    Raises:
      ValueError: with the name of the argument, if it is none.
    """
    try:
        dtype = jnp.dtype(SHORT.get(given, given) if isinstance(given, str) else given)
        if given is not None and jnp.issubdtype(dtype, jnp.floating):
            return dtype
    except TypeError:
        pass
    raise ValueError(
        f"{name} must be a dtype of floats, such as jnp.bfloat16 or its name "
        f'"bfloat16", got {given!r}'
    )
