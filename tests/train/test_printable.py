"""Names and texts of others reach no terminal as its commands."""

import io
import re
import subprocess
import sys

import pytest

from tests.checkout import ENV, ROOT
from tests.jobs import RUN_JOB
from train.cli.command import command
from train.cli.plain_console import PlainConsole
from train.cli.progress import progress
from train.cli.tables import aligned
from train.cli.times import say
from train.printable import printable
from train.store.log import warn

# A color, a window's title, a clipboard, a line that is overwritten, a command of 8-bit
# terminals, and a text that runs from right to left.
NAMES = {
    "\x1b[31mred": r"\x1b[31mred",
    "\x1b]0;title\x1b\\": r"\x1b]0;title\x1b" + "\\",
    "\x1b]52;c;aGk=\x1b\\": r"\x1b]52;c;aGk=\x1b" + "\\",
    "one\rtwo": r"one\rtwo",
    "\x9b2J\x7f": r"\x9b2J\x7f",
    "\u202egnp.exe": r"\u202egnp.exe",
}


def fail(name):
    raise ValueError(f"no such run: {name}")


def end(name):
    raise SystemExit(f"error: {name}")


def stand_in_a_bar(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")  # As on a terminal.
        with progress(name, 2) as report:
            report(1, name)
        with PlainConsole().status(name):
            pass


SAYS = {
    "print": print,
    "bar": stand_in_a_bar,
    "error": fail,
    "end": end,
    "say": say,
    "warn": warn,
    "console": lambda name: PlainConsole().print(f"runs/{name}"),
    "table": lambda name: PlainConsole().print(aligned(["", name], [[name, ""]])),
    "title": lambda name: PlainConsole().print(aligned([""], [], title=name)),
    "stderr": lambda name: PlainConsole(stderr=True).print(name),
}


# What rich itself needs to color, to move and to erase.
OWN = re.compile(r"\r?\x1b\[(\?25[lh]|1A|2K|[0-9;]*m)")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", SAYS)
def test_names_are_printed_without_commands(how, name, capsys):
    ends = ""
    try:
        with command():
            SAYS[how](name)
    except SystemExit as error:
        ends = str(error.code)
    shown = "".join(capsys.readouterr()) + ends
    if how == "bar":
        shown = OWN.sub("", shown)
    # rich drops a carriage return.
    assert NAMES[name].replace(r"\r", "") in shown.replace(r"\r", "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_the_launcher_repeats_no_commands():
    text = "|".join(name.replace("\r", "?") for name in NAMES).encode() + b"|\x9b"
    code = f"import sys; sys.stdout.buffer.write({text!r})"
    launched = [sys.executable, "-c", RUN_JOB, code]
    done = subprocess.run(launched, cwd=ROOT, env=ENV, capture_output=True, check=True)
    wanted = "|".join(NAMES.values()).replace(r"\r", "?")
    assert done.stdout.decode() == f"[0] {wanted}|\\udc9b\n"


def test_bars_of_other_libraries_stand_still():
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with command():
            for text in ("\r 10%", "\r 20%", "\r", "\n"):
                print(text, end="")
    assert out.getvalue() == "\r 10%\r 20%\r\n"


def test_other_texts_stay():
    text = "a\tb\n山 é 👍\u200d🔥 \u00a0\u200f"
    assert printable(text) == text
