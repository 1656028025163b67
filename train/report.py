"""One self-contained HTML page of a run, or of several side by side.

`decentjax report RUN [RUN ...] [--out FILE] [--figures FOLDER]`
"""

import html
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from decentjax import analysis
from decentjax.topology import Topology
from train.cli.command import command, show_usage
from train.cli.config_json import differences, from_defaults, is_elastic
from train.cli.options import Trust
from train.cli.read import from_options
from train.cli.tables import measured, quantity, words
from train.figures.members_figure import draw_members, lives
from train.figures.page import Section, html_table, write_page
from train.figures.run_figure import (
    draw_consensus,
    draw_evaluations,
    draw_losses,
    draw_mixed,
    draw_throughput,
)
from train.figures.timeline_figure import draw_timelines
from train.run.history import History, read_history
from train.store.folder import check_links
from train.store.log import PER_SECOND
from train.store.timeline import median_step_seconds, middle_steps, write_trace

DRAWN_STEPS = 4
# The facts of run.json that the page shows.
SETUP = ("command", "began", "parameters", "workers", "nodes", "processes", "algorithm")
SETUP += ("topology", "exchange", "devices", "training_examples", "versions")


def write_report(
    run_dirs: list[Path],
    out: Path,
    figures_dir: Path | None = None,
    trust: Sequence[str] = (),
) -> Path:
    """Writes the page of the runs to `out`, and returns that path.

    Args:
      run_dirs: folders of the runs.
      out: file of the page.
      figures_dir: folder for each figure as an SVG file too, if any.
      trust: modules and files of the user's own topologies.
    """
    for run_dir in run_dirs:
        check_links(run_dir)  # Before the page, or a trace, is written there.
    runs = [read_history(run_dir) for run_dir in run_dirs]
    parts = [part for run in runs for part in run.parts()]
    sections = [
        Section("Results", None, _results(parts)),
        Section("Held-out scores", draw_evaluations(parts)),
        Section("Loss", draw_losses(parts)),
        Section("Throughput", draw_throughput(parts)),
        Section("Consensus distance and learning rate", draw_consensus(parts)),
        *_peers_sections(parts),
        *_members_sections(parts),
        *_events_sections(runs),
        *_timeline_sections(runs),
        *(_topology_section(run, trust) for run in runs if _has_graph(run)),
        *_sample_sections(runs),
        Section("Setup", None, _setup(runs)),
        _configs_section(runs),
    ]
    write_page(", ".join(run.name for run in runs), sections, out, figures_dir)
    return out


def _peers_sections(parts: list[History]) -> list[Section]:
    """What the processes of peers have mixed."""
    parts = [part for part in parts if part.curve("models_mixed", "step")[0]]
    if not parts:
        return []
    text = (
        "<p>Each process is a run of its own, and its scores are those of its own "
        "workers; <code>decentjax evaluate</code> scores the mean of all. Where "
        "an age is negative, the model was of a later step than the worker's.</p>"
    )
    return [Section("Models of peers", draw_mixed(parts), text)]


def _members_sections(parts: list[History]) -> list[Section]:
    """Who trained when, in an elastic run."""
    parts = [x for x in parts if is_elastic(x.config) and lives(x)]
    if not parts:
        return []
    text = (
        "<p>A bar is broken where a process logged nothing for long: it was frozen, or "
        "waited for its quorum.</p>"
    )
    return [Section("Who trained when", draw_members(parts), text)]


def _events_sections(runs: list[History]) -> list[Section]:
    """Starts and resumes of runs, and workers that joined or left, in order of time."""
    rows = []
    for run in runs:
        # Each process of an elastic run has its own clock, and tells when it began.
        clocks = {part.name: [*itertools.chain(*lives(part))] for part in run.parts()}
        start = min((timed[0][0] for timed in clocks.values() if timed), default=0.0)
        for part in run.parts():
            timed = clocks[part.name] or [(x["seconds"] + start, x) for x in part.rows]
            rows += [(time - start, part.name, _event(row)) for time, row in timed]
    rows = [[f"{time:.1f}", *event] for time, *event in sorted(rows) if event[1]]
    heads = ["time, s", "run", "event"]
    return [Section("Events", None, html_table(heads, rows))] if rows else []


def _timeline_sections(runs: list[History]) -> list[Section]:
    """One figure of all runs with a timeline, on one scale of time, and the traces."""
    runs = [run for run in runs if run.spans and median_step_seconds(run.spans) > 0]
    if not runs:
        return []
    medians = [median_step_seconds(run.spans) for run in runs]
    # One scale for all runs: the slower one then looks slower.
    seconds = DRAWN_STEPS * max(medians)
    timelines = {
        f"{run.name}: a step takes {median:.3g} s": middle_steps(run.spans, seconds)
        for run, median in zip(runs, medians, strict=True)
    }
    figure = draw_timelines(timelines, seconds)
    traces = [write_trace(run.spans, run.folder / "trace.json") for run in runs]
    profiles = [
        path
        for run in runs
        for path in sorted(run.folder.glob("**/profile.*/**/*.trace.json.gz"))
    ]
    items = [
        f"<li><code>{html.escape(str(trace))}</code></li>"
        for trace in (*traces, *profiles)
    ]
    text = (
        "<p>Each row is a process: its computation above, its messages below. Perfetto "
        "(ui.perfetto.dev) opens the traces of the whole runs"
        + ", and the device traces of log.profile" * bool(profiles)
        + f":</p><ul>{''.join(items)}</ul>"
    )
    return [Section("Timeline", figure, text)]


def _has_graph(run: History) -> bool:
    """Whether its topology is what it mixes by: not where a policy has graphs."""
    match run.config.get("method"):
        case {"kind": "all_reduce"} | {"policy": {"kind": "thinning" | "holding"}}:
            return False
    return True


def _topology_section(run: History, trust: Sequence[str]) -> Section:
    topology = run.topology(trust)
    title = f"Topology of {run.name}: {topology.name}"
    # None of more workers than can be drawn.
    figure = topology._repr_svg_()
    return Section(title, figure, _topology_facts(topology))


def _topology_facts(topology: Topology) -> str:
    traffic = analysis.traffic(topology, model_bytes=1.0)  # In models.
    by_worker = [t.worker_bytes for t in traffic]
    by_node = [t.node_bytes for t in traffic]
    exact = analysis.exact_after(topology)
    facts = {
        "workers": topology.num_workers,
        "workers per node": topology[0].workers_per_node,
        "period": topology.period,
        "consensus factor per period": f"{analysis.consensus_factor(topology):.3g}",
        "mean exact after": "never" if exact is None else f"{exact} exchanges",
        "models sent per worker and step": f"{np.mean(by_worker):.3g}",
        "models sent per node link and step": f"{np.mean(by_node):.3g}",
    }
    return html_table(["", ""], [[key, str(value)] for key, value in facts.items()])


def _results(parts: list[History]) -> str:
    """The final scores as sentences, and as a table of all runs."""
    leads = [_lead(part) for part in parts if part.evaluations()]
    heads = ["run", "steps", "time", "training loss", "steps/s (median)", "data/s"]
    table = html_table(
        [*heads, "mean model (single workers)"], [_result_row(part) for part in parts]
    )
    others = [row for part in parts for row in _other_scores(part)]
    if others:
        table += html_table(["run", "also scored", "score"], others)
    return "".join(leads) + table


def _lead(run: History) -> str:
    name, value = run.headline, run.evaluations()[-1]["mean_model"][run.headline]
    # A process of peers scores its own workers alone.
    of = "own workers' mean model" if "/" in run.name else "mean model"
    return (
        f'<p class="lead"><b>{html.escape(quantity(value, run.unit(name)))}</b> '
        f"held-out {html.escape(words(name))} of the {of} of "
        f"{html.escape(run.name)}</p>"
    )


def _result_row(run: History) -> list[str]:
    steps, losses = run.curve("loss", "step")
    if not steps:  # It has only begun.
        return [run.name, "no step yet"]
    wanted = run.config.get("num_steps", steps[-1])
    amount = run.facts.get("amount", "examples")
    row = [
        run.name,
        f"{steps[-1]:g} of {wanted}",
        f"{run.rows[-1]['seconds']:.4g} s",
        quantity(losses[-1], run.unit("loss"), digits=4),
        f"{_median(run, 'steps'):.3g}",
        f"{_median(run, amount):,.0f} {amount}",
    ]
    if shares := run.curve("share_of_peak", "step")[1]:
        row[-1] += f", {max(shares):.0%} of the peak FLOP/s at best"
    for evaluation in run.evaluations()[-1:]:
        for name, value in evaluation["mean_model"].items():
            scores = [worker[name] for worker in evaluation["workers"]]
            spread = (quantity(x, run.unit(name)) for x in (min(scores), max(scores)))
            score = quantity(value, run.unit(name))
            row.append(f"{words(name)} {score} ({' to '.join(spread)})")
    return row


def _median(run: History, what: str) -> float:
    # The first rate includes compiling, which a mean would show.
    _, rates = run.curve(what + PER_SECOND, "step")
    return sorted(rates)[len(rates) // 2] if rates else math.nan


def _other_scores(run: History) -> list[list[str]]:
    """Rows of simpler models, and of the test scores of what the model generates."""
    results = measured(run.facts.get("results", {}))
    headline = run.headline
    baselines = [
        [run.name, name, f"{quantity(score, run.unit(headline))} {words(headline)}"]
        for name, score in results.get("baselines", {}).items()
    ]
    test = [
        [run.name, f"test {words(name)}", quantity(score, run.unit(name))]
        for name, score in results.get("test", {}).items()
    ]
    return baselines + test


def _setup(runs: list[History]) -> str:
    """What each run is, a column each, and the fields that are not the default."""
    known = [run for run in runs if run.facts]
    rows = []
    for name in SETUP:
        values = [run.facts.get(name) for run in known]
        if any(value is not None for value in values):
            rows.append([words(name), *map(_cell, values)])
    text = html_table(["", *(run.name for run in known)], rows) if known else ""
    changed = [{x[0]: x[1:] for x in from_defaults(run.config)} for run in runs]
    # A run that has the default shows it too, beside one that has not.
    defaults = {name: default for one in changed for name, (default, _) in one.items()}
    fields = [
        [
            name,
            *(str(one.get(name, (None, default))[1]) for one in changed),
            "" if default is None else str(default),
        ]
        for name, default in defaults.items()
    ]
    heads = ["field", *(run.name for run in runs), "default"]
    return f"{text}<h3>Fields that are not the default</h3>{html_table(heads, fields)}"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def _sample_sections(runs: list[History]) -> list[Section]:
    """What the mean models make, where they have a sample."""
    samples = {run.name: run.facts.get("results", {}).get("sample") for run in runs}
    return [
        Section(f"Sample of {name}", None, f"<pre>{html.escape(str(sample))}</pre>")
        for name, sample in samples.items()
        if sample is not None
    ]


def _configs_section(runs: list[History]) -> Section:
    lines = []
    for run in runs[1:]:
        phrases = differences(runs[0].config, run.config)
        items = "".join(f"<li>{html.escape(phrase)}</li>" for phrase in phrases)
        lines.append(
            f"<p>{html.escape(run.name)}, against {html.escape(runs[0].name)}:</p>"
            f"<ul>{items}</ul>"
        )
    config = html.escape(json.dumps(runs[0].config, indent=2))
    lines.append(
        f"<details><summary>{html.escape(runs[0].name)}/config.json</summary>"
        f"<pre>{config}</pre></details>"
    )
    return Section("Config", None, "\n".join(lines))


def _event(row: dict[str, Any]) -> str:
    """Start or resume of a run, or workers that joined or left; "" for other rows."""
    if "init_from" in row:
        step = f", step {row['init_step']}" if "init_step" in row else ""
        return f"began with the model of {row['init_from']}{step}"
    if "resumed" in row:
        changed = "".join(f"; {one}" for one in row.get("changed", []))
        if "rate_jump" in row:
            last, now = row["rate_jump"]
            changed += f"; the learning rate jumped from {last:.3g} to {now:.3g}"
        return f"resumed at step {row['step']}: {row['resumed']}{changed}"
    if "joined_after" in row:
        if not row["joined_after"]:
            return f"began with a peer's model at step {row['step']}"
        moved = f", {row['moved']:.3g} from its own" if "moved" in row else ""
        return (
            f"came back from step {row['joined_after']}, and went on with a peer's "
            f"model at step {row['step']}{moved}"
        )
    if "mean_moved" in row:
        alive = ", ".join(map(str, row["alive"]))
        return (
            f"from step {row['step']} on "
            + (f"with models of workers {alive}" if alive else "alone")
            + f"; the mean of all models moved by about {row['mean_moved']:.3g}"
        )
    return ""


def main(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path | None = None,
    figures: Path | None = None,
    trust: Trust = (),
) -> None:
    """Writes an HTML page with the figures of one run, or of several compared.

    Example: `decentjax report runs/ring runs/torus --out both.html`.

    Args:
      runs: folders of runs.
      out: file of the page; by default report.html in the first run's folder.
      figures: folder for each figure as an SVG file too.
    """
    if not runs:
        show_usage("usage: decentjax report RUN [RUN ...] [--out FILE]", [])
    page = out or runs[0] / "report.html"
    print(write_report(list(runs), page, figures, trust))


if __name__ == "__main__":
    with command():
        from_options(main, prog="decentjax report")
