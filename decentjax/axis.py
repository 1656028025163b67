"""The axis of the workers: its name on a mesh, and in the code of one worker."""

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

AXIS = "workers"


def axis_of(mesh: Mesh) -> str:
    """Returns the workers' axis of a mesh: "workers", or if there is none the first.

    Examples:
      >>> import jax
      >>> from decentjax.axis import axis_of
      >>> axis_of(jax.make_mesh((1, 1), ("replica", "fsdp")))
      'replica'
    """
    return AXIS if AXIS in mesh.shape else mesh.axis_names[0]


def bound_axis() -> str:
    """Returns the name of the workers' axis inside the code of one worker.

    It is "workers", or if only one other axis of a mesh is mapped, that one.
    """
    try:
        lax.axis_size(AXIS)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return manual[0] if len(manual) == 1 else AXIS
    return AXIS


def slices_of(mesh: Mesh) -> np.ndarray:
    """Returns the devices of each worker, [N, F], in the same order for each.

    Examples:
      >>> import jax
      >>> from decentjax.axis import slices_of
      >>> slices_of(jax.make_mesh((1, 1, 1), ("replica", "fsdp", "tensor"))).shape
      (1, 1)
    """
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_of(mesh)), 0)
    return devices.reshape(len(devices), -1)
