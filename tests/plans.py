"""Plans over a topology, by the names of their algorithms."""

from decentjax import Rounds, Topology, methods
from decentjax.plan import GradientMean


def awc(graph: Topology) -> Topology:
    """Adapt while communicating: `x_i <- sum_j W_ij x_j + update(grad f_i(x_i))`."""
    return graph


def atc(graph: Topology) -> Rounds:
    """Adapt, then combine: `x_i <- sum_j W_ij (x_j + update(grad f_j(x_j)))`."""
    return Rounds(graph)


def all_reduce(graph: Topology) -> GradientMean:
    """The mean of gradients over the workers of a graph."""
    return methods.all_reduce(graph.num_workers)
