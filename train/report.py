"""One self-contained HTML page of a run, or of several side by side.

`python -m train.report RUN [RUN ...] [--out FILE] [--figures FOLDER]`
"""

import base64
import dataclasses
import html
import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decentjax import analysis
from decentjax.topology import Exchange, Topology, matrices
from train.cli import command, show_usage
from train.config import TopologyConfig, WorkersConfig
from train.config_json import differences, read_fields
from train.figures.timeline_figure import draw_timelines
from train.run.log import METRICS, read_metrics
from train.run.timeline import (
    Span,
    median_step_seconds,
    middle_steps,
    read_timelines,
    write_trace,
)

MAX_DRAWN_WORKERS = 64
DRAWN_STEPS = 4
NOTES = {"init_from", "changed"}
X_AXES = {"step": "step", "seconds": "time [s]"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of a run from its folder.

    Args:
      name: of the folder.
      config: as in config.json.
      rows: as in metrics.jsonl.
      spans: as in timeline.*.jsonl, of the processes that recorded any.
      folder: of the run.
    """

    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    spans: list[Span]
    folder: Path

    def curve(self, field: str, against: str) -> tuple[list[float], list[float]]:
        """A field of the training rows, against "step" or "seconds"."""
        rows = [row for row in self.rows if field in row]
        return [row[against] for row in rows], [row[field] for row in rows]

    def evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "mean_model" in row]

    def topology(self) -> Topology:
        try:
            topology = TopologyConfig(**self.config["topology"])
            return topology.build(WorkersConfig(**self.config["workers"]))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.folder} has the config of another version: {error}"
            ) from error


def read_run(run_dir: Path) -> Run:
    """Reads a run's folder.

    Raises:
      ValueError: if the folder holds no run.
    """
    config = run_dir / "config.json"
    if not config.exists():
        raise ValueError(f"{run_dir} holds no run: it has no config.json")
    rows = read_metrics(run_dir)
    if not rows:
        raise ValueError(f"{run_dir} has no rows in {METRICS} yet")
    return Run(
        name=run_dir.resolve().name,
        config=read_fields(config),
        rows=rows,
        spans=read_timelines(run_dir),
        folder=run_dir,
    )


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
      title: its heading.
      figure: drawn below the heading.
      text: HTML below the figure.
    """

    title: str
    figure: Figure | None
    text: str = ""

    def html(self) -> str:
        image = "" if self.figure is None else _image(self.title, self.figure)
        return f"<h2>{html.escape(self.title)}</h2>\n{image}\n{self.text}"


def write_report(
    run_dirs: list[Path], out: Path, figures_dir: Path | None = None
) -> Path:
    """Writes the page of the runs to `out`, and returns it.

    Args:
      run_dirs: folders of runs.
      out: the page.
      figures_dir: where each figure goes as an SVG file, besides.
    """
    runs = [read_run(run_dir) for run_dir in run_dirs]
    sections = [
        Section("Loss", _curves_figure(runs)),
        Section("Results", _evaluation_figure(runs), _results_table(runs)),
        Section("Consensus distance and learning rate", _side_figure(runs)),
        *_timeline_sections(runs),
        *(_topology_section(run) for run in runs),
        _configs_section(runs),
    ]
    title = html.escape(", ".join(run.name for run in runs))
    body = "\n".join(section.html() for section in sections)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(PAGE.format(title=title, body=body))
    if figures_dir is not None:
        figures_dir.mkdir(parents=True, exist_ok=True)
        for section in sections:
            if section.figure is not None:
                name = section.title.lower().replace(":", "").replace(" ", "_")
                (figures_dir / f"{name}.svg").write_bytes(_svg(section.figure))
    return out


def draw_exchange(axes: Axes, exchange: Exchange) -> None:
    """Draws who hears from whom: workers on a circle, nodes side by side."""
    places = _places(exchange)
    matrix = matrices(Topology("", (exchange,)))[0]
    for i, j in itertools.combinations(range(exchange.num_workers), 2):
        weight = max(matrix[i, j], matrix[j, i])
        if weight > 0:
            same_node = i // exchange.workers_per_node == j // exchange.workers_per_node
            inside = same_node and exchange.workers_per_node > 1
            axes.plot(
                *zip(places[i], places[j], strict=True),
                color="0.7" if inside else "tab:blue",
                linewidth=0.5 + 3 * weight,
                zorder=1,
            )
    axes.scatter(*zip(*places, strict=True), s=60, color="black", zorder=2)
    for number, (x, y) in enumerate(places):
        axes.text(x, y, str(number), color="white", size=6, ha="center", va="center")
    axes.set_aspect("equal")
    axes.margins(0.15)
    axes.axis("off")


def _places(exchange: Exchange) -> list[tuple[float, float]]:
    """Workers around their node's centre, nodes around the origin."""
    nodes, local = exchange.num_nodes, exchange.workers_per_node
    centres = _circle(nodes, radius=1.0)
    if local == 1:
        return centres
    spread = _circle(local, radius=0.6 * math.sin(math.pi / max(nodes, 2)))
    return [(x + dx, y + dy) for x, y in centres for dx, dy in spread]


def _circle(count: int, radius: float) -> list[tuple[float, float]]:
    angles = (math.pi / 2 - 2 * math.pi * k / count for k in range(count))
    return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]


def _curves_figure(runs: list[Run]) -> Figure:
    figure, axes = _figure(2)
    for axis, (against, label) in zip(axes, X_AXES.items(), strict=True):
        for number, run in enumerate(runs):
            x, losses = run.curve("loss", against)
            axis.plot(x, losses, color=f"C{number}", alpha=0.25)
            axis.plot(x, _running_mean(losses), color=f"C{number}", label=run.name)
        axis.set(xlabel=label, ylabel="training loss, and its running mean")
    axes[0].legend()
    return figure


def _evaluation_figure(runs: list[Run]) -> Figure | None:
    if not any(run.evaluations() for run in runs):
        return None
    figure, axes = _figure(2)
    for axis, (against, label) in zip(axes, X_AXES.items(), strict=True):
        for number, run in enumerate(runs):
            _draw_evaluations(axis, run, against, f"C{number}")
        axis.set(xlabel=label)
    axes[0].legend()
    return figure


def _draw_evaluations(axis: Axes, run: Run, against: str, color: str) -> None:
    """A line for the mean model, a band from the best to the worst worker."""
    rows = run.evaluations()
    if not rows:
        return
    name = next(iter(rows[0]["mean_model"]))
    x = [row[against] for row in rows]
    mean = [row["mean_model"][name] for row in rows]
    workers = [[scores[name] for scores in row["workers"]] for row in rows]
    axis.plot(x, mean, marker="o", color=color, label=run.name)
    low, high = map(min, workers), map(max, workers)
    axis.fill_between(x, list(low), list(high), color=color, alpha=0.25)
    axis.set_ylabel(f"held-out {name.replace('_', ' ')} (band: workers)")


def _side_figure(runs: list[Run]) -> Figure:
    figure, (consensus, rate) = _figure(2)
    for run in runs:
        consensus.plot(*run.curve("consensus_distance", "step"), label=run.name)
        rate.plot(*run.curve("learning_rate", "step"), label=run.name)
    consensus.set(xlabel="step", ylabel="consensus distance")
    rate.set(xlabel="step", ylabel="learning rate")
    consensus.legend()
    return figure


def _timeline_sections(runs: list[Run]) -> list[Section]:
    """One picture of all runs with a timeline, on one scale of time, and the traces."""
    runs = [run for run in runs if run.spans]
    if not runs:
        return []
    medians = [median_step_seconds(run.spans) for run in runs]
    seconds = DRAWN_STEPS * max(medians)
    timelines = {
        f"{run.name}: {median:.3g} s/step": middle_steps(run.spans, seconds)
        for run, median in zip(runs, medians, strict=True)
    }
    figure = draw_timelines(timelines, seconds)
    traces = []
    for run in runs:
        trace = write_trace(run.spans, run.folder / "trace.json")
        traces.append(f"<li><code>{html.escape(str(trace))}</code></li>")
    text = (
        "<p>Each row is a process; above, what it computes, below, what travels. "
        "Perfetto (ui.perfetto.dev) opens the whole runs:</p>"
        f"<ul>{''.join(traces)}</ul>"
    )
    return [Section("Timeline", figure, text)]


def _topology_section(run: Run) -> Section:
    topology = run.topology()
    title = f"Topology of {run.name}: {topology.name}"
    if topology.num_workers > MAX_DRAWN_WORKERS:
        return Section(title, None, _topology_facts(topology))
    drawn = min(topology.period, 6)
    figure, axes = _figure(drawn, width=2.6, height=2.8)
    for step, axis in enumerate(axes):
        draw_exchange(axis, topology[step])
        axis.set_title(f"exchange {step + 1} of {topology.period}")
    return Section(title, figure, _topology_facts(topology))


def _topology_facts(topology: Topology) -> str:
    traffic = analysis.traffic(topology, model_bytes=1.0)
    by_worker, by_node = zip(
        *((t.worker_bytes, t.node_bytes) for t in traffic), strict=True
    )
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
    return _table(["", ""], [[key, str(value)] for key, value in facts.items()])


def _results_table(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        steps, losses = run.curve("loss", "step")
        _, rates = run.curve("steps_per_second", "step")
        row = [run.name, f"{steps[-1]:g}", f"{losses[-1]:.4f}"]
        row.append(f"{sorted(rates)[len(rates) // 2]:.1f}")
        for evaluation in run.evaluations()[-1:]:
            for name, value in evaluation["mean_model"].items():
                scores = [worker[name] for worker in evaluation["workers"]]
                spread = f"{min(scores):.3f} to {max(scores):.3f}"
                row.append(f"{name.replace('_', ' ')} {value:.3f} ({spread})")
        rows.append(row)
    heads = ["run", "steps", "training loss", "steps/s (median)"]
    return _table([*heads, "mean model (single workers)"], rows)


def _configs_section(runs: list[Run]) -> Section:
    lines = []
    for run in runs[1:]:
        phrases = differences(runs[0].config, run.config)
        items = "".join(f"<li>{html.escape(phrase)}</li>" for phrase in phrases)
        lines.append(
            f"<p>{html.escape(run.name)}, against {html.escape(runs[0].name)}:</p>"
            f"<ul>{items}</ul>"
        )
    lines += [_note(run, row) for run in runs for row in run.rows if NOTES & row.keys()]
    config = html.escape(json.dumps(runs[0].config, indent=2))
    lines.append(
        f"<details><summary>{html.escape(runs[0].name)}/config.json</summary>"
        f"<pre>{config}</pre></details>"
    )
    return Section("Config", None, "\n".join(lines))


def _note(run: Run, row: dict[str, Any]) -> str:
    """What the log says of how a run began, or went on in another way."""
    if "init_from" in row:
        text = f"began with the model of {row['init_from']}, step {row['init_step']}"
    else:
        text = f"from step {row['step']} on {', '.join(row['changed'])}"
    return f"<p>{html.escape(f'{run.name}: {text}')}</p>"


def _running_mean(values: list[float]) -> list[float]:
    """The mean of each value and those just before, a fortieth of all."""
    window = max(1, len(values) // 40)
    ends = range(1, len(values) + 1)
    return [float(np.mean(values[max(0, end - window) : end])) for end in ends]


def _figure(columns: int, width: float = 5.0, height: float = 3.4):
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, axes


def _image(title: str, figure: Figure) -> str:
    data = base64.b64encode(_svg(figure)).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "decentjax"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _table(heads: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
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


def main(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path | None = None,
    figures: Path | None = None,
) -> None:
    """Writes one HTML page with the figures of one run, or of several compared.

    Args:
      runs: folders of runs.
      out: the page; by default report.html in the first run's folder.
      figures: a folder for each figure as an SVG file, besides.
    """
    if not runs:
        show_usage("usage: python -m train.report RUN [RUN ...] [--out FILE]", [])
    print(write_report(list(runs), out or runs[0] / "report.html", figures))


if __name__ == "__main__":
    with command():
        tyro.cli(main, prog="python -m train.report")
