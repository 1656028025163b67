"""Pictures of a run for the tutorial: its terminal, and its report.

`python docs/screenshots.py`, with the extra `train` and Debian's package chromium,
trains the quickstart and writes docs/terminal.svg and docs/report.png.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich import _export_format
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 112, 24  # Characters.
REPORT = 1000, 1330  # Pixels.


def recorded(command: list[str]) -> str:
    """What a command writes on a terminal."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", HEIGHT, WIDTH, 0, 0))
    written = b""
    with subprocess.Popen(command, stdout=there, stderr=subprocess.STDOUT) as process:
        os.close(there)
        try:
            while data := os.read(here, 1 << 16):
                written += data
        except OSError:  # The terminal's other side is closed.
            pass
    assert process.returncode == 0
    return written.decode()


def shown(written: str) -> str:
    """The lines as they stand in the end, and the progress in the middle of it."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        states = re.split(r"\r|\x1b\[\d*[AK]|\x1b\[\?25[hl]", line)
        states = [state for state in states if state.strip()]
        progress = [state for state in states if "steps/s" in state]
        lines += progress[len(progress) // 2 :][:1] if len(progress) > 9 else []
        lines += states[-1:] if states and states[-1] not in progress else []
        lines += [] if states else [""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = ["decentjax", "train", "quickstart", "--run-dir", "runs/quickstart"]
        program = [sys.executable, "-m", *command]
        os.environ["PYTHONPATH"] = str(DOCS.parent)
        os.chdir(folder)
        text = f"$ {' '.join(command[:3])}\n" + shown(recorded(program))
        terminal = Console(record=True, width=WIDTH, file=io.StringIO())
        terminal.print(Text.from_ansi(text))
        # Without the fonts that it would fetch from the network.
        form = re.sub(
            r"@font-face \{\{.*?\}\}",
            "",
            _export_format.CONSOLE_SVG_FORMAT,
            flags=re.DOTALL,
        )
        terminal.save_svg(str(DOCS / "terminal.svg"), title="", code_format=form)
        width, height = REPORT
        page = Path("runs/quickstart/report.html").resolve()
        options = (
            f"--headless --no-sandbox --hide-scrollbars --window-size={width},{height}"
        )
        picture = f"--screenshot={DOCS / 'report.png'}"
        subprocess.run(
            ["chromium", *options.split(), picture, page.as_uri()], check=True
        )


if __name__ == "__main__":
    main()
