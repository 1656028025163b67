"""A page of sections with figures, as one file of HTML."""

import base64
import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from train.figures.style import save_svg, to_svg


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
      title: heading, plain text.
      figure: figure below the heading, if any.
      text: HTML below the figure.
    """

    title: str
    figure: Figure | None
    text: str = ""

    def html(self) -> str:
        title, image = html.escape(self.title), ""
        if self.figure is not None:
            # Inside the page, so that it is one file that can be sent.
            data = base64.b64encode(to_svg(self.figure)).decode()
            image = f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
        return f"<h2>{title}</h2>\n{image}\n{self.text}"


def write_page(
    title: str, sections: Sequence[Section], out: Path, figures_dir: Path | None = None
) -> None:
    """Writes a page, and each figure as an SVG file too where a folder is given."""
    body = "\n".join(section.html() for section in sections)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(PAGE.format(title=html.escape(title), body=body))
    for section in sections:
        if figures_dir is not None and section.figure is not None:
            name = section.title.lower().replace(":", "").replace(" ", "_")
            save_svg(section.figure, figures_dir / f"{name}.svg")


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{line(heads, 'th')}</tr>{body}</table>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto;
       padding: 0 1rem; color: #222; background: #fff; }}
img {{ max-width: 100%; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .2rem .8rem .2rem 0; text-align: left;
          border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""
