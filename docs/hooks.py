"""Hooks of the site: files outside docs/ have one home and are part of it all the same.

README is the front page, and whatever else a page links to, a figure or a table in
`configs` say, comes along at its path in the repository. Notebooks are pages, with the
outputs that they hold.
"""

import itertools
import json
import os.path
import re
from pathlib import Path

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?!https?:|data:)([^)#\s]+)")
NOTEBOOK = "-notebook.md"  # The notebook itself is there too, to download.
# The links below README's title are buttons of the front page.
BUTTONS = re.compile(r"^\[Tutorial\].* · .*$", re.MULTILINE)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CELL = re.compile(r"<(th|td)\b([^>]*)>(.*?)</\1>", re.DOTALL)
CODE = re.compile(r"(?<!</span>)<code>([^<]+)</code>")  # Within text.
TIGHT = re.compile(r" (?=[±%])|(?<=±) ")  # Blanks within a number.
BREAKS = re.compile(r"([ ._/=,(])")
NARROW = 2  # Columns that fit on a telephone.
INLINE_MATH = re.compile(r":math:`([^`]+)`")
DISPLAY_MATH = re.compile(r"^\.\. math::\n((?:[ \t]+\S.*\n?|[ \t]*\n)+)", re.MULTILINE)


@event_priority(100)  # mkdocstrings copies the list.
def on_config(config: MkDocsConfig) -> None:
    """Adds the formulas of docstrings to the extensions of Markdown."""
    config.markdown_extensions.append(Math())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README, and all files of the repository that pages link to."""
    files.append(_brought(config, "index.md", "README.md"))
    for path in sorted((ROOT / "docs").glob("*.ipynb")):
        uri = _in_site(path.name)
        files.append(File.generated(config, uri, content=_notebook(path)))
    pages = [page.src_uri for page in files.documentation_pages()]
    while pages:
        page = pages.pop()
        for target in _targets(page, (ROOT / _in_repository(page)).read_text()):
            if files.get_file_from_path(_in_site(target)) is None:
                files.append(_brought(config, _in_site(target), target))
                pages += [target] if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: object) -> str:
    """Turns links between files of the repository into links of the site."""
    here = page.file.src_uri

    def link(match: re.Match[str]) -> str:
        target = _target(here, match[0])
        if not (ROOT / target).is_file():
            return match[0]  # MkDocs warns of it.
        return os.path.relpath(_in_site(target), os.path.dirname(here) or ".")

    if here == "index.md":
        markdown = BUTTONS.sub(_as_buttons, markdown)
    return LINK.sub(link, markdown)


def on_page_content(html: str, **kwargs: object) -> str:
    """Lets tables become cards on a telephone, and code break where it may."""
    return CODE.sub(_with_breaks, TABLE.sub(_with_labels, html))


def _as_buttons(line: re.Match[str]) -> str:
    buttons = [f"{link}{{ .md-button }}" for link in line[0].split(" · ")]
    buttons[0] = buttons[0].replace(" }", " .md-button--primary }")
    return " ".join(buttons)


def _with_labels(table: re.Match[str]) -> str:
    """The table, each cell of which knows the head of its column."""
    cells = CELL.findall(table[0])
    heads = [re.sub('<.*?>|"', "", text) for kind, _, text in cells if kind == "th"]
    if len(heads) <= NARROW:
        return table[0]
    labels = itertools.cycle(heads)

    def labelled(cell: re.Match[str]) -> str:
        kind, attributes, text = cell.groups()
        label = next(labels) if kind == "td" else ""
        if not (label and text):
            return cell[0]
        text = TIGHT.sub("\N{NO-BREAK SPACE}", text)
        return f'<td data-label="{label}"{attributes}><span>{text}</span></td>'

    return CELL.sub(labelled, table[0]).replace("<table>", "<table data-cards>", 1)


def _with_breaks(code: re.Match[str]) -> str:
    """Code breaks at blanks and within names, never after the -- of an option."""
    return "<code>" + BREAKS.sub(r"\1<wbr>", code[1]) + "</code>"


def _targets(page: str, markdown: str) -> list[str]:
    targets = [_target(page, link) for link in LINK.findall(markdown)]
    return [target for target in targets if (ROOT / target).is_file()]


def _target(page: str, link: str) -> str:
    """The path in the repository to which a page's link leads."""
    return os.path.normpath(os.path.join(os.path.dirname(_in_repository(page)), link))


def _in_repository(page: str) -> str:
    if page == "index.md":
        return "README.md"
    page = page.replace(NOTEBOOK, ".ipynb")
    return f"docs/{page}" if (ROOT / "docs" / page).exists() else page


def _in_site(path: str) -> str:
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/").replace(".ipynb", NOTEBOOK)


def _brought(config: MkDocsConfig, uri: str, path: str) -> File:
    return File.generated(config, uri, abs_src_path=str(ROOT / path))


def _notebook(path: Path) -> str:
    """A notebook as Markdown, with what its code has printed and drawn."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                image = output["data"]["image/png"]
                parts.append(f"![What this code draws](data:image/png;base64,{image})")
    parts.append(f'<a href="../{path.name}" download>Download this notebook</a>')
    return "\n\n".join(parts)


class Math(Extension):
    """Formulas in reStructuredText's notation, as MathML, which needs no script."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        # After whitespace (30) and fenced code (25), before blocks of HTML (20).
        md.preprocessors.register(_MathPreprocessor(md), "math", priority=22)


class _MathPreprocessor(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = DISPLAY_MATH.sub(self._display, "\n".join(lines) + "\n")
        return INLINE_MATH.sub(self._inline, text).split("\n")

    def _inline(self, match: re.Match[str]) -> str:
        return self._stored(match[1], "inline")

    def _display(self, match: re.Match[str]) -> str:
        return f"\n{self._stored(match[1], 'block')}\n\n"

    def _stored(self, latex: str, display: str) -> str:
        formula = convert(" ".join(latex.split()), display=display)
        return self.md.htmlStash.store(formula)
