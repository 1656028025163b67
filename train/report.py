"""One self-contained HTML page of a run, or of several side by side.

`python -m train.report RUN [RUN ...] [--out FILE] [--figures FOLDER]`
"""

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from decentjax import analysis
from decentjax.topology import Topology
from train.cli.command import command, show_usage
from train.cli.config_json import differences
from train.figures.members_figure import draw_members, lives
from train.figures.page import Section, html_table, write_page
from train.figures.run_figure import (
    draw_consensus,
    draw_evaluations,
    draw_losses,
    draw_mixed,
    draw_topology,
)
from train.figures.style import words
from train.figures.timeline_figure import draw_timelines
from train.run.folder import check_links
from train.run.history import History, read_history
from train.run.timeline import median_step_seconds, middle_steps, write_trace

MAX_DRAWN_WORKERS = 64
DRAWN_STEPS = 4
NOTES = {"init_from", "changed", "joined_after"}


def write_report(
    run_dirs: list[Path], out: Path, figures_dir: Path | None = None
) -> Path:
    """Writes the page of the runs to `out`, and returns that path.

    Args:
      run_dirs: folders of the runs.
      out: file of the page.
      figures_dir: folder for each figure as an SVG file too, if any.
    """
    for run_dir in run_dirs:
        check_links(run_dir)  # Before the page, or a trace, is written there.
    runs = [read_history(run_dir) for run_dir in run_dirs]
    parts = [part for run in runs for part in run.parts()]
    sections = [
        Section("Loss", draw_losses(parts)),
        Section("Results", draw_evaluations(parts), _results_table(parts)),
        Section("Consensus distance and learning rate", draw_consensus(parts)),
        *_peers_sections(parts),
        *_members_sections(parts),
        *_timeline_sections(runs),
        *(_topology_section(run) for run in runs),
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
        "workers; <code>python -m train.evaluate</code> scores the mean of all. Where "
        "an age is negative, the model was of a later step than the worker's.</p>"
    )
    return [Section("Models of peers", draw_mixed(parts), text)]


def _members_sections(parts: list[History]) -> list[Section]:
    """Who trained when, in an elastic run."""
    elastic = [x for x in parts if x.config.get("exchange", {}).get("elastic")]
    parts = [part for part in elastic if lives(part)]
    if not parts:
        return []
    text = (
        "<p>A bar is broken where a process logged nothing for long: it was frozen, or "
        "waited for its quorum.</p>"
    )
    return [Section("Who trained when", draw_members(parts), text)]


def _timeline_sections(runs: list[History]) -> list[Section]:
    """One figure of all runs with a timeline, on one scale of time, and the traces."""
    runs = [run for run in runs if run.spans]
    if not runs:
        return []
    medians = [median_step_seconds(run.spans) for run in runs]
    # One scale for all runs: the slower one then looks slower.
    seconds = DRAWN_STEPS * max(medians)
    timelines = {
        f"{run.name}: {median:.3g} s/step": middle_steps(run.spans, seconds)
        for run, median in zip(runs, medians, strict=True)
    }
    figure = draw_timelines(timelines, seconds)
    traces = [write_trace(run.spans, run.folder / "trace.json") for run in runs]
    items = [f"<li><code>{html.escape(str(trace))}</code></li>" for trace in traces]
    text = (
        "<p>Each row is a process: its computation above, its messages below. Perfetto "
        "(ui.perfetto.dev) opens the traces of the whole runs:</p>"
        f"<ul>{''.join(items)}</ul>"
    )
    return [Section("Timeline", figure, text)]


def _topology_section(run: History) -> Section:
    topology = run.topology()
    title = f"Topology of {run.name}: {topology.name}"
    # Numbers of more workers would cover each other.
    drawable = topology.num_workers <= MAX_DRAWN_WORKERS
    figure = draw_topology(topology) if drawable else None
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


def _results_table(runs: list[History]) -> str:
    rows = []
    for run in runs:
        steps, losses = run.curve("loss", "step")
        _, rates = run.curve("steps_per_second", "step")
        row = [run.name, f"{steps[-1]:g}", f"{losses[-1]:.4f}"]
        # The first rate includes compiling, which a mean would show.
        row.append(f"{sorted(rates)[len(rates) // 2]:.1f}")
        for evaluation in run.evaluations()[-1:]:
            for name, value in evaluation["mean_model"].items():
                scores = [worker[name] for worker in evaluation["workers"]]
                spread = f"{min(scores):.3f} to {max(scores):.3f}"
                row.append(f"{words(name)} {value:.3f} ({spread})")
        rows.append(row)
    heads = ["run", "steps", "training loss", "steps/s (median)"]
    return html_table([*heads, "mean model (single workers)"], rows)


def _configs_section(runs: list[History]) -> Section:
    lines = []
    for run in runs[1:]:
        phrases = differences(runs[0].config, run.config)
        items = "".join(f"<li>{html.escape(phrase)}</li>" for phrase in phrases)
        lines.append(
            f"<p>{html.escape(run.name)}, against {html.escape(runs[0].name)}:</p>"
            f"<ul>{items}</ul>"
        )
    parts = [part for run in runs for part in run.parts()]
    lines += [
        _note(one, row) for one in parts for row in one.rows if NOTES & row.keys()
    ]
    config = html.escape(json.dumps(runs[0].config, indent=2))
    lines.append(
        f"<details><summary>{html.escape(runs[0].name)}/config.json</summary>"
        f"<pre>{config}</pre></details>"
    )
    return Section("Config", None, "\n".join(lines))


def _note(run: History, row: dict[str, Any]) -> str:
    """How a run began, or what changed when it resumed."""
    if "init_from" in row:
        text = f"began with the model of {row['init_from']}, step {row['init_step']}"
    elif "joined_after" in row:
        moved = f", {row['moved']:.3g} from its own" if "moved" in row else ""
        text = (
            f"came back from step {row['joined_after']}, and went on with a peer's "
            f"model at step {row['step']}{moved}"
        )
    else:
        text = f"from step {row['step']} on {', '.join(row['changed'])}"
    return f"<p>{html.escape(f'{run.name}: {text}')}</p>"


def main(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path | None = None,
    figures: Path | None = None,
) -> None:
    """Writes an HTML page with the figures of one run, or of several compared.

    Args:
      runs: folders of runs.
      out: file of the page; by default report.html in the first run's folder.
      figures: folder for each figure as an SVG file too.
    """
    if not runs:
        show_usage("usage: python -m train.report RUN [RUN ...] [--out FILE]", [])
    print(write_report(list(runs), out or runs[0] / "report.html", figures))


if __name__ == "__main__":
    with command():
        tyro.cli(main, prog="python -m train.report")
