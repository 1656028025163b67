"""README and the pages of docs/ hold: commands and code run, links lead somewhere."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import train.__main__ as train_command
from decentjax.__main__ import COMMANDS as TOOLS
from tests.checkout import ENV, ROOT
from tests.pages import CONSTANTS, MODULES, public_names, run_all
from train.cli.changes import check_field
from train.cli.command import EXTRAS as BROUGHT_BY
from train.cli.families import shipped_configs
from train.cli.load import load_config
from train.cli.sections import KINDS
from train.launch import COMMANDS as LAUNCHED

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


class Command(NamedTuple):
    """A command of a page.

    Args:
      line: as it stands there, on one line.
      extras: extras that the text around it names, or "train".
    """

    line: str
    extras: frozenset[str]


class Asked(NamedTuple):
    """How a program is asked for help, and what that must then name.

    Args:
      words: module, and its arguments.
      options: options that the help must name.
    """

    words: tuple[str, ...]
    options: tuple[str, ...]


def commands_of(text: str) -> Iterator[Command]:
    """Those in fenced and indented blocks, in tables and in sentences."""
    blocks = blocks_of(text)
    for place, block in enumerate(blocks):
        if block.startswith("```sh\n"):
            near = "\n".join(blocks[max(place - 1, 0) : place + 2])
            lines = re.split(r"&&\n?|\n", block.removeprefix("```sh\n").strip("`\n"))
        elif block.startswith("    ") and "x_i" not in block:
            near = "\n".join(blocks[max(place - 1, 0) : place + 2])
            lines = block.split("\n")
        else:
            for near in block.split("\n"):
                for line in re.findall(r"`((?:decentjax|srun|mpirun) [^`]+)`", near):
                    yield Command(line, extras_in(near))
            continue
        yield from (Command(line.strip(), extras_in(near)) for line in lines)


def blocks_of(text: str) -> list[str]:
    """Paragraphs, lists and tables, and commands; without blocks of code."""
    text = re.sub(r"<!--.*?-->\n", "", text)
    text = re.sub(r"```(?!sh\n)\w+\n.*?\n```\n", "", text, flags=re.DOTALL)
    return text.strip("\n").split("\n\n")


def extras_in(text: str) -> frozenset[str]:
    """ "The extras `a` and `b`", and those that `pip install` names."""
    lists = re.findall(r"extras? ((?:`\w+`(?:,| and)? ?)+)", text)
    lists += re.findall(r"'\.\[(\w+)\]'", text)
    return frozenset(re.findall(r"\w+", " ".join(lists))) - {"and"} | {"train"}


def asked(line: str) -> Asked | None:
    """How the last program of a command is asked for help; None for others' programs.

    Raises:
      ValueError: it is none that is known here.
    """
    words = shlex.split(line)
    others = (".venv/bin/pip", "pip", "sbatch")
    if words[-2:] == ["venv", ".venv"] or words[0] in others:
        return None
    if "pytest" in words or "python" in words:
        return None
    places = [i for i, word in enumerate(words) if Path(word).name == "decentjax"]
    if not places:
        raise ValueError(f"no program that is known here: {line}")
    name, *rest = words[places[0] + 1 :]
    module, first = TOOLS[name].module, TOOLS[name].first
    options = tuple(word.partition("=")[0] for word in rest if word.startswith("--"))
    if name in ("train", "preflight") or "--measure" in rest:
        measured = ["--measure"] if "--measure" in rest else []
        # Own functions, `--method FILE.py:NAME`, are those of the reader.
        pairs = zip(["", *rest], rest, strict=False)
        words = [x for before, x in pairs if before not in ("--method", "--topology")]
        # A file that is not here is the reader's own too.
        files = [x for x in words if ".py" in x]
        is_here = [(ROOT / x.partition(":")[0]).exists() for x in files]
        pairs = zip(files, is_here, strict=True)
        config = [file if here else "quickstart" for file, here in pairs]
        # By its name, without a path.
        config += [x for x in rest if x in shipped_configs()]
        named = [x for x in rest if x.removeprefix("--") in KINDS]
        chosen = [(one, rest[rest.index(one) + 1]) for one in named]
        kinds = [x for one in chosen if ".py:" not in one[1] for x in one]
        return Asked((module, *measured, *config[:1], *kinds, "--help"), options)
    kind = () if name == "resume" else first
    if name in ("bench", "prepare", "checkpoint"):
        kind = tuple(rest[:1])
    return Asked((module, *kind, "--help"), options)


def parts(line: str) -> list[str]:
    """The commands that one command starts: its own, and what it hands on."""
    before, separator, after = line.partition(" -- ")
    if separator:
        if made := re.match(r"decentjax slurm (\S+)", before):
            after = f"decentjax train {made[1]} {after.partition(' > ')[0]}"
        return [before, *parts(after)]
    names = (
        "minutes|seed|faults|steps|out|every|elastic-share|processes(?:-per-worker)?"
    )
    own = rf"(?: --(?:{names}) \S+)*"
    if harmed := re.fullmatch(rf"python -m benches.chaos ([^-]\S*){own}(.*)", line):
        return [f"decentjax train {harmed[1]}{harmed[2]}"]
    own = r"(?:--processes|-n|--workers) \d+(?: --processes-per-worker \d+)?"
    own += r"(?: --first-process \S+ --places \d+)?(?: --elastic)?"
    launched = re.fullmatch(rf"(.*decentjax launch {own}) (\S+)(.*)", line)
    if launched is None:
        return [line]
    _, target, rest = launched.groups()
    if target.endswith(".py") and "/" not in target:  # The reader's own script.
        return [line]
    name = target if target in LAUNCHED else f"train {target}"
    rest += " --exchange peers" * launched[1].endswith(" --elastic")
    return [f"{launched[1]} {target}", f"decentjax {name}{rest}"]


COMMANDS = [command for text in PAGES.values() for command in commands_of(text)]
BLOCKS = [
    (page, block)
    for page, text in PAGES.items()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
# What is to hold after some of the blocks, in the same process.
SOLVED = "assert abs({} - jax.numpy.array([1.0, -2.0, 3.0])).max() < 0.05"
LEARNED = """
found, models = np.asarray(losses), globals().get("stacked")
models = state.params if models is None else models
assert found.shape[1] == 8
assert found[-10:].mean() < found[0].mean() / 5
assert all(abs(x - x.mean(0)).max() < 0.1 for x in jax.tree.leaves(models))
if "ema" in globals():
    assert 0 < abs(averaged - jnp.array([1.0, -2.0, 3.0])).max() < 0.05
    assert abs(ema - models).max() > 0
"""
SOLVED_BY_STATE = SOLVED.format(
    "jax.numpy.asarray(jax.tree.leaves(state.params)[-1]).mean(0).ravel()"
)
CHECKS = {
    "targets = jnp.array": "assert abs(x - 1.4444).max() < 1e-3",
    "step = wrap(": SOLVED.format("params"),
    "decentralize(adamw": SOLVED.format("params"),
    "state = train_step.init": SOLVED_BY_STATE,
    "state, t = step.init": SOLVED_BY_STATE,
    "state = init_state": SOLVED_BY_STATE,
}


def asked_of(with_emulate: bool) -> list[Asked]:
    """All that the pages have without the extra `emulate`, or with it."""
    found = [
        asked(part)
        for command in COMMANDS
        if ("emulate" in command.extras) == with_emulate
        for part in parts(command.line)
    ]
    return [one for one in found if one is not None]


def test_every_extra_is_known_here():
    assert MODULES.keys() == EXTRAS.keys()
    assert all(command.extras <= EXTRAS.keys() for command in COMMANDS)
    # Of a missing package the error names the extra, which brings it or its owner.
    assert set(BROUGHT_BY.values()) <= EXTRAS.keys()
    for package, extra in BROUGHT_BY.items():
        assert extra == "train" or package in MODULES[extra] | {"PIL"}


# `.ci/run` runs both.
SETUP, TESTS, *MORE = re.findall(r"```sh\n(.*?)```", PAGES["README.md"], re.DOTALL)


def test_readme_needs_nothing_that_a_reader_does_not_have():
    setup = r"python3 -m venv .venv && [^\n]*\n"
    assert re.fullmatch(setup + r"\S+/decentjax train quickstart\n", SETUP)
    assert re.fullmatch(setup + r".* -m pytest .*\n", TESTS)
    assert MORE == []
    indented = re.findall(r"^    (.*)$", prose_of("README.md"), re.MULTILINE)
    assert {line.split()[0] for line in indented} == {"x_i", "decentjax"}


def test_no_page_installs_from_an_index_that_does_not_have_it():
    lines = [x for text in PAGES.values() for x in re.findall("pip install.*", text)]
    assert [x for x in lines if re.search("install '?decentjax", x)] == []


def test_it_has_a_command_of_each_tool():
    tools = {one.words[0] for emulate in (False, True) for one in asked_of(emulate)}
    files = [*ROOT.glob("*/__main__.py"), *ROOT.glob("train/*/__main__.py")]
    files.remove(ROOT / "decentjax" / "__main__.py")
    files += [
        path
        for path in (ROOT / "train").glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    ]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    assert tools == {name.removesuffix(".__main__") for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("emulate", [False, True])
def test_commands_have_help_that_names_their_options(emulate):
    """With the packages of no other extra than those that the page names for them.

    Help needs no GPU and no compiler of one: those are hidden always.
    """
    extras = {"train"} | ({"emulate"} if emulate else set())
    if emulate:
        pytest.importorskip("pyroute2")
    all_asked = asked_of(emulate)
    words = list(dict.fromkeys(one.words for one in all_asked))
    without = [("benches", "race", "--help"), ("train.emulate", "--help")]
    results = run_all([*words, *(() if emulate else without)], extras)
    if not emulate:
        for code, _ in (results.pop() for _ in without):
            assert code.startswith("error: an emulated cluster needs its extra: pip ")
    texts = dict(zip(words, results, strict=True))
    for one in all_asked:
        code, text = texts[one.words]
        assert code == 0, (one, text)
        missing = [x for x in one.options if not re.search(rf"{x}(?![\w-])", text)]
        if "fields are options" in " ".join(text.split()):
            config = load_config(Path("quickstart"))
            for option in missing:
                section, _, field = option.removeprefix("--").rpartition(".")
                kinds = KINDS.get(section.replace("policy", "method.policy"), {})
                fields = [x for kind in kinds.values() for x in vars(kind())]
                if field.replace("-", "_") not in fields:
                    check_field(config, option.removeprefix("--"), option)
            missing = []
        assert missing == [], (one, text)


def test_the_configs_of_commands_exist():
    words = [word for command in COMMANDS for word in shlex.split(command.line)]
    # A file without a folder is the reader's own.
    words = [x for x in words if x.endswith((".py", ".sbatch")) and "/" in x]
    paths = [word.replace("NAME", "quickstart") for word in words]
    assert [path for path in paths if not list(ROOT.glob(path))] == []


@pytest.mark.slow
def test_the_hyperparameters_of_the_page_are_those_of_the_configs():
    page = (ROOT / "docs" / "hyperparameters.md").read_text()
    seen = 0
    for section in page.split("\n## ")[2:-1]:
        own, _, rows = section.partition("\n")
        row = r"^\| (?:`(\w+)` )?`(\w+(?:\.\w+)*)` \| (.+?) \|"
        for other, field, value in re.findall(row, rows, re.MULTILINE):
            if field in shipped_configs():
                continue  # A row of a whole config.
            config = load_config(Path(other or own.strip("`")))
            got = functools.reduce(getattr, field.split("."), config)
            if isinstance(got, int | float) and not isinstance(got, bool):
                assert got == float(value.replace(",", "")), (own, field)
            else:
                assert str(getattr(got, "name", got)) == value, (own, field)
            seen += 1
    assert seen > 100


def test_the_configs_of_train_commands_fit_together(monkeypatch):
    """With their options, which are read as by the program; nothing is trained."""
    made = []
    monkeypatch.setattr(
        train_command, "run_here", lambda config, *_, **__: made.append(config)
    )
    file = r"((?:configs/|tests/|examples/\w+/)?\w+(?:\.py)?)(:\w+)? ?(.*)"
    for line in [part for command in COMMANDS for part in parts(command.line)]:
        found = re.search(f"decentjax train {file}", line)
        # Not the reader's own, nor one that is cut short, nor help.
        if not found or ("." in found[1] and not (ROOT / found[1]).exists()):
            continue
        if any(x in line for x in ("...", "…", "NAME", "--help", "own_method.py")):
            continue
        config = found[1] + (found[2] or "")
        train_command.main([config, *shlex.split(found[3])])
    assert len(made) > 20


@pytest.mark.parametrize(
    ("page", "word", "most"),
    [("recipes", "nnx.split(model)", 20), ("own-project", "initialize()", 25)],
)
def test_a_model_of_flax_needs_few_lines(page, word, most):
    (block,) = (x for at, x in BLOCKS if at == f"docs/guides/{page}.md" and word in x)
    assert sum(map(bool, map(str.strip, block.split("\n")))) <= most


# Runs each block in a process that has imported the library, and is as new otherwise.
RUN_BLOCKS = """
import json, os, sys, types

import decentjax.gossip, flax.nnx, jax, optax

folder, codes = sys.argv.pop(), []
for number, block in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            path = f"{folder}/{number}-{stream}"
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(block, "block", "exec"), vars(sys.modules["__main__"]))
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


def checked(page: str, block: str) -> str:
    """A block, and what is to hold after it."""
    checks = [check for word, check in CHECKS.items() if word in block]
    if page == "docs/guides/recipes.md":
        checks = [LEARNED]
    return "\n".join([block, *checks])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_code_blocks_run_as_pasted(part, tmp_path):
    blocks = BLOCKS[part::4]
    codes = subprocess.run(
        [sys.executable, "-c", RUN_BLOCKS, tmp_path],
        input=json.dumps([checked(*one) for one in blocks]),
        env=ENV,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    for number, (code, one) in enumerate(zip(json.loads(codes), blocks, strict=True)):
        page, block = one
        lines, errors = (
            (tmp_path / f"{number}-{stream}").read_text() for stream in (1, 2)
        )
        assert code == 0, (page, errors)
        lines = lines.splitlines()
        if "analysis.compare(graphs" in block:
            rows = [f"| {' | '.join(line.split())} |" for line in lines[1:]]
            assert len(rows) == 12
            assert [row for row in rows if row not in PAGES[page]] == []
        if "job, graph, num_steps=1000" in block:
            assert len(lines) == 5
            assert [line for line in lines if line not in PAGES[page]] == []


def test_the_checks_of_blocks_are_of_some():
    blocks = [block for _, block in BLOCKS]
    assert len(blocks) == 53
    assert sum(word in block for word in CHECKS for block in blocks) == 20
    for word in ("analysis.compare(graphs", "job, graph, num_steps=1000"):
        assert sum(word in block for block in blocks) == 1


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    links = links_of(page)
    assert [link for link in links if not (ROOT / link.path).is_file()] == []
    inside = [link for link in links if link.heading]
    assert [x for x in inside if x.heading not in headings_of(x.path)] == []


def test_each_page_is_linked():
    linked = {link.path for page in PAGES for link in links_of(page)}
    assert PAGES.keys() - linked == {"README.md"}


def test_readme_is_short():
    assert PAGES["README.md"].count("\n") <= 150
    assert len(PAGES["README.md"].split()) <= 1300


@pytest.mark.parametrize(
    ("page", "source"),
    [
        ("docs/results/race.md", "configs/race.md"),
        ("docs/results/runtime-model.md", "configs/model.md"),
    ],
)
def test_tables_that_are_in_part_have_rows_of_the_whole(page, source):
    whole = (ROOT / source).read_text().split("\n")
    tables = [x for x in PAGES[page].split("\n\n") if x.split("\n")[0] in whole]
    assert len(tables) == 2
    assert [
        row for table in tables for row in table.split("\n") if row not in whole
    ] == []


def test_the_reference_has_each_public_name_once():
    text = "".join(text for page, text in PAGES.items() if "docs/api/" in page)
    found = re.findall(r"^::: decentjax\.(.*)$", text, re.MULTILINE)
    assert sorted(found) == sorted(public_names())
    assert all(f"`decentjax.{name}`" in text for name in CONSTANTS)


class Link(NamedTuple):
    """A link to a file of the repository.

    Args:
      path: path from the root of the repository.
      heading: as the site calls it, or "".
    """

    path: str
    heading: str


def links_of(page: str) -> list[Link]:
    """Those to files and figures, relative to the page."""
    found = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", prose_of(page))
    folder = os.path.dirname(page)
    return [
        Link(os.path.normpath(os.path.join(folder, path)) if path else page, heading)
        for path, heading in found
    ]


def headings_of(page: str) -> set[str]:
    """As the site calls them: in lower case and with hyphens, or a name of the API."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).lower() for heading in headings)
    names = re.findall(r"^::: (.*)$", PAGES[page], re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", x.strip()) for x in words} | set(names)


def prose_of(page: str) -> str:
    return re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
