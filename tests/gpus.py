"""Meshes of GPUs that are not there, to compile for."""

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.targets import H100
from train.xla import COMPILE_ONLY


def gpu_mesh(nodes: int, per_node: int, **axes: int) -> Mesh:
    """A mesh of H100s, all on the axis "workers" where no axes are given."""
    description = topologies.get_topology_desc(
        platform="cuda",
        target_config=H100.config(),
        topology=f"{nodes} x {per_node} x 1",
    )
    shape = axes or {"workers": nodes * per_node}
    devices = np.array(description.devices).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape))


def shapes(mesh: Mesh, tree, *axes):
    """The tree's shapes, as arrays on the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def compiled(function, *arguments) -> jax.stages.Compiled:
    return jax.jit(function).lower(*arguments).compile(COMPILE_ONLY)
