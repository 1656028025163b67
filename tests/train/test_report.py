"""The report: one page, drawn from the files of a run alone."""

import base64
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from decentjax import runtime, topology
from tests import tiny
from tests.changes import changed
from tests.run_folders import make_run, timed
from train.config import AllReduceMethod, LogConfig, OptimizerConfig
from train.figures.page import Section, write_page
from train.figures.run_figure import draw_evaluations
from train.figures.style import grid
from train.figures.timeline_figure import draw_timelines
from train.report import write_report
from train.run.history import History, read_history
from train.run.loop import train
from train.run.resume import Resume
from train.store.folder import check_run
from train.store.log import METRICS, read_metrics
from train.store.timeline import (
    ActivitySpan,
    drop_spans,
    median_step_seconds,
    middle_steps,
    read_timelines,
    spans_of,
)


def images(page: str) -> list[ET.Element]:
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return [ET.fromstring(base64.b64decode(data)) for data in found]


def test_a_page_of_two_runs_compares_them_and_needs_nothing_else(tmp_path):
    runs = [
        make_run(tmp_path / "first", 2.5),
        make_run(tmp_path / "second", 3.5, seed=7),
    ]
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert len(images(page)) == 6
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "<li>seed was 0 and is 7</li>" in page
    for mean in (2.5, 3.5):
        assert f"<td>bits per byte {mean} ({mean} to {mean + 3})</td>" in page


FACTS = {
    "command": "decentjax train tests/tiny.py --seed 1",
    "parameters": 7344,
    "versions": {"jax": "0.10.2", "Python": "3.11"},
    "headline": "bits_per_byte",
    "units": {"loss": "nats"},
    "amount": "tokens",
    "results": {"baselines": {"count <model>": 4.0}, "sample": "def <f>:"},
}


def test_the_page_says_how_the_run_was_made_and_what_came_of_it(tmp_path):
    run = make_run(tmp_path / "run", 2.5, seed=1)
    (run / "run.json").write_text(json.dumps(FACTS))
    page = write_report([run], tmp_path / "page.html").read_text()
    assert page.index("<b>2.5</b> held-out bits per byte") < page.index("<img ")
    for cells in (
        ("command", FACTS["command"]),
        ("parameters", "7,344"),
        ("versions", "jax 0.10.2, Python 3.11"),
        ("seed", "1", "0"),
        ("task.model.width", "16", "128"),
        ("run", "count &lt;model&gt;", "4 bits per byte"),
    ):
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" in page
    assert "0.8333 nats" in page
    assert "<pre>def &lt;f&gt;:</pre>" in page
    # What has its default is not among the fields.
    assert "<td>method</td>" not in page


def test_a_headline_that_the_rows_lack_is_an_error(tmp_path):
    run = make_run(tmp_path / "run", 2.5)
    (run / "run.json").write_text(json.dumps({**FACTS, "headline": "bleu"}))
    reason = "run/run.json: headline must be .*, one of bits_per_byte, got 'bleu'"
    with pytest.raises(ValueError, match=reason):
        write_report([run], tmp_path / "page.html")


def test_only_rows_with_the_headline_are_drawn(tmp_path):
    """As of a task whose headline has changed since."""
    run = make_run(tmp_path / "run", 2.5)
    row = {"step": 0, "seconds": 0.5, "mean_model": {"x": 1.0}, "workers": [{"x": 1.0}]}
    rows = (run / METRICS).read_text()
    (run / METRICS).write_text(json.dumps(row) + "\n" + rows)
    (run / "run.json").write_text(json.dumps(FACTS))
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "<b>2.5</b> held-out bits per byte" in page


def test_numbers_that_are_not_finite_are_shown_as_such(tmp_path):
    """Of each kind, and in all rows: null is what the files have."""
    run = make_run(tmp_path / "run", 2.5)
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    for row in rows:
        row |= {x: None for x in ("loss", "consensus_distance") if x in row}
        if "mean_model" in row:
            row |= {"mean_model": {"bits_per_byte": None}}
            row["workers"][2] = {"bits_per_byte": None}
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = {"baselines": {"count": None}, "test": {"bleu": None}}
    (run / "run.json").write_text(json.dumps({**FACTS, "results": results}))
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "<b>nan</b> held-out bits per byte" in page
    assert "<td>test bleu</td><td>nan</td>" in page


def test_a_line_of_one_point_is_seen_and_an_empty_section_is_not(tmp_path):
    figure, ((axes,),) = grid(1, 1, 4, 3)
    axes.plot([1], [2])
    axes.plot([1, 2], [2, 3])
    sections = [Section("Drawn", figure), Section("Empty", None)]
    write_page("page", sections, tmp_path / "page.html")
    assert [line.get_marker() for line in axes.lines] == ["o", "None"]
    page = (tmp_path / "page.html").read_text()
    assert "Drawn" in page
    assert "Empty" not in page


def test_a_share_is_drawn_in_percent():
    rows = [{"step": 1, "seconds": 1.0, "mean_model": {"top_1": 0.5}}]
    rows[0]["workers"] = [{"top_1": 0.25}, {"top_1": 0.75}]
    run = History(Path("run"), {}, rows, [], facts={"units": {"top_1": "share"}})
    figure = draw_evaluations([run])
    assert figure is not None
    axis = figure.axes[0]
    assert axis.get_ylabel() == "held-out top 1 [%] (band: workers)"
    assert axis.yaxis.get_major_formatter()(0.5) in ("50", "50.0")


def test_a_score_called_as_a_column_moves_no_point():
    scores = {"error": 0.5, "step": 99.0, "seconds": 99.0}
    row = {"step": 1, "seconds": 2.0, "mean_model": scores, "workers": [scores]}
    figure = draw_evaluations([History(Path("run"), {}, [row], [])])
    assert figure is not None
    drawn = [axis.get_lines()[0].get_xdata()[0] for axis in figure.axes]
    assert drawn == [1, 2.0]


def test_a_drawn_part_of_the_timeline_avoids_evaluations():
    steps = [ActivitySpan(0, "step", t, float(t), t + 1.0) for t in range(8)]
    evaluated = ActivitySpan(0, "evaluate", 4, 4.5, 5.0)
    assert [s.step for s in middle_steps(steps, 2.0)] == [4, 5]
    assert [s.step for s in middle_steps([*steps, evaluated], 2.0)] == [5, 6]
    assert median_step_seconds([*steps, evaluated]) == 1.0
    # Where one is in every part, the middle is drawn with it.
    always = [ActivitySpan(0, "evaluate", t, t + 0.5, t + 0.9) for t in range(8)]
    assert {s.activity for s in middle_steps([*steps, *always], 2.0)} == {
        *("step", "evaluate")
    }


def test_a_curve_is_over_steps_or_seconds(tmp_path):
    run = read_history(make_run(tmp_path / "run", 3.0))
    assert run.curve("loss", "step") == ([1, 2, 3], [3.0, 1.5, 1.0])
    assert run.curve("loss", "seconds") == ([0.5, 1.0, 1.5], [3.0, 1.5, 1.0])


def test_the_figures_are_files_where_asked(tmp_path):
    run = make_run(tmp_path / "run", 2.5)
    write_report([run], tmp_path / "page.html", tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"loss.svg", "held-out_scores.svg"} < names


def test_a_run_without_evaluations_is_drawn_too(tmp_path):
    run = make_run(tmp_path / "run", 2.5)
    rows = [row for row in read_metrics(run) if "loss" in row]
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert images(write_report([run], tmp_path / "page.html").read_text())


@pytest.mark.slow
def test_a_run_without_a_step_is_a_row(tmp_path):
    """As a process that has joined and takes its first one."""
    runs = [make_run(tmp_path / name, 2.5) for name in ("first", "second")]
    (runs[1] / METRICS).write_text('{"seconds": 0.1, "step": 0, "began": 1.0}\n')
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert "<td>no step yet</td>" in page


def test_all_reduce_has_no_topology(tmp_path):
    runs = [
        make_run(tmp_path / "first", 2.5),
        make_run(tmp_path / "all", 2.5, method=AllReduceMethod()),
    ]
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert "Topology of first" in page
    assert "Topology of all" not in page


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run: it has no config\.json$"):
        write_report([tmp_path], tmp_path / "page.html")
    (make_run(tmp_path / "run", 2.5) / METRICS).write_text("")
    with pytest.raises(ValueError, match=f"has no rows in {METRICS} yet"):
        write_report([tmp_path / "run"], tmp_path / "page.html")


@pytest.mark.parametrize(("num_steps", "seconds"), [(1, 1.0), (4, 1.0)])
def test_a_timeline_of_any_length_is_drawn(num_steps, seconds, tmp_path):
    run = make_run(tmp_path / "run", 2.5)
    timed(run, 0, range(num_steps))
    assert median_step_seconds(read_timelines(run)) == pytest.approx(seconds)
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "<h2>Timeline</h2>" in page
    trace = json.loads((run / "trace.json").read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["process 0"]
    places = [(e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    halves = [(5e5 * number, 5e5) for number in range(2 * num_steps)]
    np.testing.assert_allclose(places, halves, atol=2)  # Microseconds.


def test_what_is_done_again_is_dropped_from_the_timelines(tmp_path):
    timed(tmp_path, 0, range(4))
    timed(tmp_path, 1, range(4))
    drop_spans(tmp_path, 2)
    timed(tmp_path, 0, range(2, 3))
    spans = {(s.process, s.step) for s in read_timelines(tmp_path)}
    assert spans == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}


@pytest.mark.slow
def test_a_run_of_one_step_has_a_timeline_that_grows_when_it_goes_on(tmp_path):
    """And that has nothing of a run that came to no checkpoint."""
    timed(tmp_path, 7, range(4))
    config = changed(
        tiny.config,
        num_steps=1,
        optimizer=OptimizerConfig(warmup_steps=0),
        log=LogConfig(every_steps=1, timeline=True),
    )
    train(config, tmp_path)
    write_report([tmp_path], tmp_path / "page.html")
    spans = read_timelines(tmp_path)
    assert [s[:3] for s in spans] == [(0, "step", 0), (0, "evaluate", 0)]
    train(config, tmp_path, Resume())
    assert read_timelines(tmp_path) == spans


CLUSTER = runtime.Cluster(
    num_nodes=4, workers_per_node=2, between_bytes_per_second=4.0, between_latency=0.01
)
JOB = runtime.Job(model_bytes=1.0, compute=runtime.gamma(0.5, 0.5))
RING = topology.one_peer_ring(8)
SIMULATED = {
    "all_reduce": runtime.all_reduce(CLUSTER, JOB, 9),
    "in_step": runtime.in_step(CLUSTER, JOB, RING, 9),
    "not_hidden": runtime.in_step(CLUSTER, JOB, RING, 9, hidden=False),
    "background": runtime.background(CLUSTER, JOB, RING, 9),
}


@pytest.mark.parametrize("times", SIMULATED.values(), ids=SIMULATED)
def test_simulated_workers_compute_or_wait_at_each_moment(times):
    spans = spans_of(times, 5)
    assert {span.process for span in spans} == set(range(5))
    assert {span.step for span in spans} == set(range(9))
    for worker in range(5):
        own = [s for s in spans if s.process == worker and s.activity != "exchange"]
        clock = 0.0
        for span in sorted(own, key=lambda s: s.start):
            assert span.start == pytest.approx(clock)
            assert span.end > span.start
            clock = span.end
        assert clock == pytest.approx(times.end[-1, worker])
        for step in range(9):
            of_step = {s.activity: s for s in own if s.step == step}
            start, end = times.start[step, worker], times.end[step, worker]
            computed = start + times.compute[step, worker]
            assert of_step["compute"][3:] == pytest.approx((start, computed))
            if "wait" in of_step:
                assert of_step["wait"][3:] == pytest.approx((computed, end))
            else:
                assert end == pytest.approx(computed)


@pytest.mark.parametrize("times", SIMULATED.values(), ids=SIMULATED)
def test_simulated_exchanges_begin_where_they_were_sent(times):
    spans = [span for span in spans_of(times, 8) if span.activity == "exchange"]
    got = {(span.step, span.process): (span.start, span.end) for span in spans}
    wanted = {
        tuple(at): (times.sent[*at], times.sent[*at] + times.exchange[*at])
        for at in np.argwhere(times.exchange > 0).tolist()
    }
    assert got == wanted
    assert len(spans) == len(got)


def test_what_takes_no_time_is_no_span():
    numbers = [[[0.0]], [[2.0]], [[0.0]], [[0.0]], [[0.0]], [[0.0]]]
    times = runtime.Times(*map(np.array, numbers))
    assert spans_of(times, 1) == [ActivitySpan(0, "compute", 0, 0.0, 2.0)]
    late = times._replace(exposed=np.array([[0.5]]), waiting=np.array([[0.25]]))
    sent = late._replace(sent=np.array([[1.0]]), exchange=np.array([[1.5]]))
    assert spans_of(sent, 1) == [
        ActivitySpan(0, "compute", 0, 0.0, 2.0),
        ActivitySpan(0, "wait", 0, 2.0, 2.75),
        ActivitySpan(0, "exchange", 0, 1.0, 2.5),
    ]


def test_timelines_are_drawn_below_each_other_on_one_scale():
    ring, whole = (SIMULATED[name] for name in ("in_step", "all_reduce"))
    timelines = {"ring": spans_of(ring, 2), "all": spans_of(whole, 3)}
    figure = draw_timelines(timelines, 7.0, "worker")
    for axes, (title, spans) in zip(figure.axes, timelines.items(), strict=True):
        assert axes.get_title(loc="left") == title
        assert axes.get_ylabel() == "worker"
        assert axes.get_xlim() == (0, 7)
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels == [str(worker) for worker in range(len(labels))]
        assert len(labels) == 2 + (title == "all")
        assert axes.yaxis_inverted()
        boxes = [bars.get_paths()[0].get_extents() for bars in axes.collections]
        assert [(box.x0, box.x1) for box in boxes] == [s[3:] for s in spans]
        for box, span in zip(boxes, spans, strict=True):
            assert span.process <= box.y0 < box.y1 < span.process + 1
        # What a worker does is above, what travels meanwhile below.
        for bottom, top in ((0, 0.45), (0.45, 0.8)):
            travels = bottom > 0
            of_kind = [
                (box.y0 - span.process, box.y1 - span.process)
                for box, span in zip(boxes, spans, strict=True)
                if (span.activity == "exchange") == travels
            ]
            np.testing.assert_allclose(of_kind, [(bottom, top)] * len(of_kind))
    named = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert named == ["compute", "exchange", "wait"]


def test_a_folder_of_runs_is_said_to_have_them(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"json; there are \S+/runs/a in it"):
        check_run(tmp_path / "runs")


@pytest.mark.parametrize(
    ("graph", "edges"),
    [
        (topology.complete(1), 0),
        (topology.ring(5), 5),
        (topology.star(6), 5),
        (topology.hierarchical(4, 2, topology.ring), 6),
    ],
)
def test_every_edge_of_an_exchange_is_drawn_once(graph, edges):
    drawn = graph.to_svg()
    assert drawn.count("<line") == edges
    assert drawn.count("<circle") == graph.num_workers
