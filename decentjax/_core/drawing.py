"""Drawings of topologies, as SVG."""

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

MOST_WORKERS = 64  # Numbers of more workers would cover each other.
MOST_DRAWN = 8  # Exchanges.
COLUMNS = 4
SIZE, RADIUS, DOT, HEAD = 180, 66, 8, 24  # Pixels.
INSIDE, BETWEEN = "#999999", "#1f77b4"  # Edges inside nodes, and between them.
# Also on a dark page: the numbers are on dots.
INK, PAPER = "#666666", "#ffffff"

Point = tuple[float, float]


class DrawnExchange(NamedTuple):
    """An exchange to draw.

    Args:
      matrix: its mixing matrix, [N, N].
      workers_per_node: number of consecutive workers that share a node.
    """

    matrix: np.ndarray
    workers_per_node: int


def draw_exchanges(title: str, exchanges: Sequence[DrawnExchange], period: int) -> str:
    """Returns an SVG of who hears from whom: workers on a circle, nodes side by side.

    A line is wider the more weight the model has that comes along it, and has an arrow
    if it comes in one direction only.

    Args:
      title: title of the figure.
      exchanges: the first exchanges, each in a panel of its own.
      period: number of all exchanges.
    """
    columns = min(COLUMNS, len(exchanges))
    rows = -(-len(exchanges) // columns)
    width, height = columns * SIZE, HEAD + rows * (SIZE + HEAD)
    parts = [_text(width / 2, 17, title, 14)]
    for number, one in enumerate(exchanges):
        row, column = divmod(number, columns)
        x, y = column * SIZE, HEAD + row * (SIZE + HEAD)
        parts.append(f'<g transform="translate({x + SIZE / 2:g} {y + SIZE / 2:g})">')
        parts += _panel(one)
        if period > 1:
            parts.append(_text(0, SIZE / 2 + 12, f"{number + 1} of {period}", 11))
        parts.append("</g>")
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    arrow = (
        '<defs><marker id="to" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5" '
        'markerHeight="5" orient="auto"><path d="M0 0L6 3L0 6z" '
        f'fill="{BETWEEN}"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
        f'text-anchor="middle">{arrow}{"".join(parts)}</svg>'
    )


def _panel(one: DrawnExchange) -> Iterable[str]:
    matrix, local = one
    places = _places(len(matrix), local)
    near = min(map(math.dist, places, places[1:]), default=SIZE)
    dot = min(DOT, 0.45 * near)
    for i, j in itertools.combinations(range(len(matrix)), 2):
        there, back = matrix[j, i], matrix[i, j]  # i to j, and j to i.
        if max(there, back) > 0:
            is_inside = local > 1 and i // local == j // local
            ends = (i, j) if there else (j, i)
            yield _line(
                *(places[end] for end in ends),
                colour=INSIDE if is_inside else BETWEEN,
                width=0.6 + 3 * max(there, back),
                dot=0.0 if there and back else dot,
            )
    for number, (x, y) in enumerate(places):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dot:.1f}" fill="{INK}"/>'
        yield _text(x, y + 0.37 * dot, str(number), 1.1 * dot, PAPER)


def _line(start: Point, end: Point, colour: str, width: float, dot: float) -> str:
    """A line; with an arrow that ends at the dot, if its size is given."""
    (x, y), (to_x, to_y) = start, end
    if dot:
        length = math.hypot(to_x - x, to_y - y)
        share = 1 - dot / length
        to_x, to_y = x + share * (to_x - x), y + share * (to_y - y)
    head = ' marker-end="url(#to)"' if dot else ""
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" '
        f'stroke="{colour}" stroke-width="{width:.2g}"{head}/>'
    )


def _text(x: float, y: float, text: str, size: float, colour: str = INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:.3g}"'
    return f'<text {place} fill="{colour}">{html.escape(text)}</text>'


def _places(num_workers: int, local: int) -> list[Point]:
    """Workers around their node's centre, nodes around the origin."""
    num_nodes = num_workers // local
    if 1 in (num_nodes, local):
        return _circle(num_workers, RADIUS)
    # Half the distance of two centres is sin(pi / nodes): at 0.6 of it no nodes meet.
    spread = 0.6 * math.sin(math.pi / num_nodes)
    radius = RADIUS / (1 + spread)
    workers = _circle(local, spread * radius)
    return [
        (x + dx, y + dy) for x, y in _circle(num_nodes, radius) for dx, dy in workers
    ]


def _circle(count: int, radius: float) -> list[Point]:
    # From the top, clockwise.
    angles = (2 * math.pi * k / count - math.pi / 2 for k in range(count))
    radius *= count > 1
    return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]
