"""Draws the graphs of the guide: `python docs/gallery.py` writes docs/graphs.svg."""

import re
from pathlib import Path

from decentjax import Topology, topology

WIDTH = 6 * 180
GRAPHS = (
    topology.complete(8),
    topology.ring(8),
    topology.star(8),
    topology.exponential(8),
    topology.torus(8),
    topology.ring_lattice(8, 4),
    topology.one_peer_ring(8),
    topology.butterfly_groups(8),
    topology.one_peer_exponential(8),
    topology.hypercube(8),
    topology.k_peer_exponential(8, 2),
    topology.base_k(6, 1),
    topology.hierarchical(16, 4, topology.ring),
    topology.alternating_exponential_ring(16, 4),
)


def gallery(graphs: tuple[Topology, ...]) -> str:
    """Drawings side by side, as many as a row has place for."""
    parts, x, y, height = [], 0, 0, 0
    for graph in graphs:
        drawn = graph.to_svg()
        box = re.search(r'width="(\d+)" height="(\d+)"', drawn)
        assert box is not None
        wide, high = map(int, box.groups())
        if x + wide > WIDTH:
            x, y, height = 0, y + height, 0
        parts.append(drawn.replace("<svg ", f'<svg x="{x}" y="{y}" ', 1))
        x, height = x + wide, max(height, high)
    whole = f'width="{WIDTH}" height="{y + height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {whole}>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    Path(__file__).with_name("graphs.svg").write_text(gallery(GRAPHS))
