"""A page of sections with figures, as one file of HTML."""

import base64
import dataclasses
import functools
import html
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from train.figures.style import Format, save_figure, to_svg
from train.plain_files import write_whole


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
      title: heading, plain text.
      figure: figure below the heading, if any, or its SVG.
      text: HTML below the figure.
    """

    title: str
    figure: Figure | str | None
    text: str = ""

    @functools.cached_property
    def svg(self) -> bytes | None:
        if isinstance(self.figure, str):
            return self.figure.encode()
        return None if self.figure is None else to_svg(self.figure)

    def save(self, folder: Path, kind: Format) -> None:
        """Writes the figure, if there is one; one that is SVG stays so."""
        name = self.title.lower().replace(":", "").replace(" ", "_")
        if isinstance(self.figure, Figure) and kind != "svg":
            save_figure(self.figure, folder / f"{name}.{kind}")
        elif self.svg is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / f"{name}.svg", self.svg)

    def html(self) -> str:
        title, image = html.escape(self.title), ""
        if self.svg is not None:
            # Inside the page, so that it is one file that can be sent.
            data = base64.b64encode(self.svg).decode()
            image = f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
        return f"<h2>{title}</h2>\n{image}\n{self.text}"


def write_page(
    title: str,
    sections: Sequence[Section],
    out: Path,
    figures_dir: Path | None = None,
    kind: Format = "svg",
) -> None:
    """Writes a page, and each figure as a file too where a folder is given.

    Sections with nothing in them are left out.
    """
    sections = [section for section in sections if section.svg or section.text]
    body = "\n".join(section.html() for section in sections)
    out.parent.mkdir(parents=True, exist_ok=True)
    page = PAGE.format(title=html.escape(title), body=body)
    # Half a character, as JSON may have it, is no UTF-8.
    write_whole(out, page.encode(errors="backslashreplace"))
    if figures_dir is not None:
        for section in sections:
            section.save(figures_dir, kind)


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML; empty heads have no row."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)

    head = f"<tr>{line(heads, 'th')}</tr>" if any(heads) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>'


# Figures are drawn on white; where the reader prefers dark, their light is inverted and
# their colours stay.
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>
:root {{ color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ddd;
        --soft: #f4f4f5; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #ddd; --paper: #171717; --line: #3a3a3a; --soft: #242424; }}
  img {{ filter: invert(0.91) hue-rotate(180deg); }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto;
       padding: 0 1rem; color: var(--ink); background: var(--paper); }}
h1, td, li, code {{ overflow-wrap: anywhere; }}
h2 {{ margin-top: 2.5rem; }}
img {{ max-width: 100%; }}
.lead {{ font-size: 1.1rem; }}
.lead b {{ font-size: 1.8rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: .5rem 0; }}
td, th {{ padding: .2rem 1.2rem .2rem 0; text-align: left; vertical-align: top;
          border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }}
td:first-child {{ overflow-wrap: normal; }}
pre {{ padding: .6rem .8rem; background: var(--soft); white-space: pre-wrap;
      overflow-wrap: anywhere; }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""
