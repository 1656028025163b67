"""What is printed and drawn is the text itself, in any encoding of the output."""

import ast
import contextlib
import io
import re
import sys

import pytest
from rich.console import Console

from tests.checkout import ROOT
from train.cli.command import command
from train.cli.plain_console import PlainConsole
from train.cli.progress import over, progress
from train.cli.tables import aligned
from train.figures.style import grid, to_svg
from train.store.log import Log

NAMES = [
    "lr=[0.1,0.2]",
    "runs/[v1]",
    "[red]x",
    "a[/b]c",
    "[a]/[/a]",
    ":x:",
    "[@click=f]",
]


def said(capsys):
    """All that has been printed, without line breaks and a terminal's commands."""
    shown = "".join(capsys.readouterr().out.split("\n"))
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(name, capsys):
    console = PlainConsole(width=200)
    console.print(name)
    console.print(aligned([name, "b"], [[name, name]], title=name, bold=name))
    assert said(capsys).count(name) == 5


@pytest.mark.parametrize("name", NAMES)
def test_names_stand_in_bars_as_they_are(name, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # As on a terminal.
    monkeypatch.setenv("NO_COLOR", "1")
    console = PlainConsole(width=200, highlight=False)
    with console.status(name):
        pass
    assert name in said(capsys)
    assert list(over([1, 2], name, console)) == [1, 2]
    assert name in said(capsys)
    with progress(name, 4) as report:
        report(2, f"worker {name}")
    assert f"worker {name}" in said(capsys)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("terminal", ["", "1"])
def test_folders_are_printed_as_they_are(name, terminal, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.store.log.SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setenv("FORCE_COLOR", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    units = {"loss": name, "error": name}
    with Log(tmp_path, 10, 0, "error", units=units) as log:
        log.say(f"folder {name}")
        log.metrics(5, {"loss": 1.0, "steps_per_second": 2.0})
        log.evaluation(5, {"error": 1.0}, {0: {"error": 1.0}})
    shown = said(capsys)
    assert f"folder {name}" in shown
    assert f"loss 1.0000 {name}" in shown
    assert f"held-out error 1.000 {name} (workers 1.000 {name} to" in shown


def test_no_console_takes_names_for_markup():
    """rich's own is made nowhere, but for the bars of `train.data`, which name none."""
    made = {}
    for room in ("train", "benches"):
        for path in sorted((ROOT / room).rglob("*.py")):
            calls = [
                node.func.id
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            ]
            if Console.__name__ in calls:
                made[str(path.relative_to(ROOT))] = calls.count(Console.__name__)
    assert made == {"train/data/files.py": 1}


@pytest.mark.parametrize(
    ("encoding", "errors", "wanted"),
    [
        ("ascii", "strict", b"\\u5c71 \\xe9 \\ud83d"),
        ("latin-1", "strict", b"\\u5c71 \xe9 \\ud83d"),
        ("utf-8", "strict", "山 é \\ud83d".encode()),
        ("utf-8", "surrogateescape", "山 é \\ud83d".encode()),
        ("ascii", "replace", b"? ? ?"),  # As PYTHONIOENCODING=ascii:replace asks.
    ],
)
@pytest.mark.parametrize("say", [print, lambda text: PlainConsole().print(text)])
def test_the_rest_is_printed_as_escapes(encoding, errors, wanted, say, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding, errors))
    with command():
        say("山 é \ud83d")
    assert out.getvalue() == wanted + b"\n"


def test_an_output_in_memory_is_left_as_it_is():
    with contextlib.redirect_stdout(io.StringIO()) as out, command():
        print("山")
    assert out.getvalue() == "山\n"


@pytest.mark.parametrize("name", [r"r$\foo$", "a$b$", "$", "lr=$1 to $2"])
def test_dollars_in_names_are_no_formula_in_figures(name):
    drawn = {}
    for shown in (name, name.replace("$", "S")):
        figure, ((axes,),) = grid(1, 1, 4, 3)
        axes.semilogy([1, 2], [1e-9, 1e9], label=shown)  # Ticks with powers of ten.
        axes.set_title(shown)
        axes.set_xticks([1, 2], [shown, "b"])
        axes.legend()
        drawn[shown] = to_svg(figure).decode()
        assert to_svg(figure).decode() == drawn[shown]  # Drawn again.
    for text in drawn.values():
        assert text.count("10^") == drawn[name].count("10^") > 0
    assert all(f"<!-- {name} -->" in drawn[name] for name in drawn)
