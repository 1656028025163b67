"""Names of version 0.2, for one release more."""

import warnings
from typing import Any

import optax

from decentjax.optim import decentralize


def dadam(
    learning_rate: Any, topology: Any, axis_name: Any, *betas_and_eps: Any, **more: Any
) -> optax.GradientTransformationExtraArgs:
    """`decentralize(optax.adam(learning_rate, ...), topology, axis_name)`."""
    _warn("adam")
    adam = optax.adam(learning_rate, *betas_and_eps, **more)
    return decentralize(adam, topology, axis_name)


def dadamw(
    learning_rate: Any,
    topology: Any,
    axis_name: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    weight_decay: Any = 1e-4,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """`decentralize(optax.adamw(learning_rate, ...), topology, axis_name)`."""
    _warn("adamw")
    adamw = optax.adamw(
        learning_rate, b1, b2, eps, eps_root, weight_decay=weight_decay, mask=mask
    )
    return decentralize(adamw, topology, axis_name)


def _warn(name: str) -> None:
    warnings.warn(
        f"d{name} ends with the next version: write decentralize(optax.{name}(...), "
        "topology, axis_name)",
        DeprecationWarning,
        stacklevel=3,
    )
