"""Compares configs over several seeds.

`decentjax compare CONFIG.py [...] --seeds 3 [--tune FIELD VALUE ... [--budget N]]`
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from train.cli.changes import (
    FIELDS,
    Changes,
    as_change,
    take_fields,
    with_changes,
)
from train.cli.command import command, show_usage
from train.cli.families import matching_configs
from train.cli.load import load_config
from train.cli.progress import progress
from train.cli.read import from_options
from train.cli.tables import file_name, label
from train.config import Config
from train.figures.comparison_figure import Panel, draw_comparison, draw_tuning
from train.figures.run_figure import MORE_AXES
from train.figures.style import save_svg
from train.plain_files import write_whole
from train.run.setup import make_run
from train.study.clock import Clock
from train.study.comparison import NO_UNITS, Entry, statements, table
from train.study.outcome import SeedsOutcome, kept
from train.study.replayed import train_simulated
from train.study.seeds import draws_of, seeds_at_once
from train.study.tune import (
    EDGE,
    UNFINISHED,
    Best,
    Grid,
    choose,
    profiles,
    read_grid,
    tuning_table,
)
from train.tasks.task import Headline, Task, build_task

NO_CLOCK = Clock()


def compare(
    configs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    seeds: int = 3,
    first_seed: int = 0,
    at_once: int | None = None,
    change: Changes = (),
    vary: Annotated[tuple[tuple[str, ...], ...], tyro.conf.Suppress] = (),
    tune: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = (),
    budget: int | None = None,
    score: str | None = None,
    clock: Clock = NO_CLOCK,
    out: Path = Path("runs/compare"),
) -> None:
    """Trains each config with several seeds and compares the mean models.

    All workers and all seeds of a config are simulated as one program, on one device.
    The folder keeps the results of each config: a second call trains only what is
    missing.

    With a clock, steps take the time they would take on a cluster, whose workers may be
    late: the table has the simulated seconds, and the figure is plotted over them.
    Configs of peers need one, since what a worker mixes depends on which workers are
    late.

    Behind the configs their fields are options, as of `train`: one value is that of all
    configs, and with several each config is trained with each, or each combination. A
    value of several parts has quotes, as `--optimizer.decay-steps "100 150"`.

    Examples: `decentjax compare quickstart quickstart_allreduce --seeds 3`, as a short
    trial first with `--num-steps 200`, and `decentjax compare quickstart --lr 5e-3
    1e-2`.

    Args:
      configs: config files, names, or patterns of names such as "digits_*".
      seeds: number of seeds; each gives an initial model and an order of the data.
        Three show only large differences.
      first_seed: the first seed.
      at_once: number of seeds trained together, if the device's memory cannot hold all;
        by default all.
      change: FIELD=VALUE of all configs, such as "num-steps=6000", each.
      vary: a field and its values, such as ("optimizer.accum-steps", "1", "2"), each.
      tune: a field and its values, such as "optimizer.learning-rate 5e-3 1e-2 2e-2":
        each config uses its best, chosen by `score` of one more seed on every second
        held-out example; results are then on the others. Repeat it to add fields.
      budget: number of choices of values that each config may try, in a search along
        one field after the other from the config's own values; by default all
        combinations are tried.
      score: score that is tested for differences, and by which `tune` chooses, such as
        "training_loss"; by default the headline of the task, which also chooses in
        place of a score of generated text, such as "bleu".
      clock: compute times of the workers, in simulated time.
      out: folder for all results, the table and the figure.

    Raises:
      ValueError: if there is nothing to compare, or the field cannot hold a value.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if at_once is not None and at_once < 1:
        raise ValueError(f"at_once must be at least 1, got {at_once}")
    chosen = [config for given in configs for config in _varied(given, change, vary)]
    headline = _compared(_common_headline(chosen), score)
    numbers = range(first_seed, first_seed + seeds)
    for config in chosen:
        _ends(config, numbers, clock)
    (grid,) = {read_grid(tune, config, budget) for config in chosen}
    out.mkdir(parents=True, exist_ok=True)
    # A config is trained with each choice of values, and with the best of them.
    total = len(chosen) * (grid.most + 1)
    most = "at most " if grid.budget else ""
    places = (f"{number} of {most}{total}" for number in itertools.count(1))
    train = functools.partial(
        _trained, at_once=at_once, out=out, clock=clock, places=places
    )
    entries, bests = zip(
        *(_entry(config, numbers, grid, train, headline) for config in chosen),
        strict=True,
    )
    _check_score(headline, entries[0])
    ends = {
        entry.name: _ends(best.config, numbers, clock)
        for entry, best in zip(entries, bests, strict=True)
    }
    seconds = {name: of_steps[-1] for name, of_steps in ends.items()}
    simulated = seconds if clock.runs else {}
    units = build_task(chosen[0].task).units
    fields = (*grid.fields, "tried") if grid.fields else ()
    shown = table(entries, simulated, fields, headline.name, units)
    remarks = _remarks(shown, _words(bests[0].score) if grid.fields else None)
    text = "\n\n".join([shown, *remarks, *statements(entries, headline)])
    write_whole(out / "compare.md", text + "\n")
    time = "seconds, simulated" if clock.runs else "step"
    _draw_entries(entries, ends, headline, units, time, out / "compare.svg")
    print(f"\n{text}\n\nfigure  {out / 'compare.svg'}")
    if grid.fields:
        names = [config.name for config in chosen]
        _write_tuning(dict(zip(names, bests, strict=True)), grid, out)


def _remarks(shown: str, chosen_by: str | None) -> list[str]:
    """What to know of the values in a table, if any were chosen by a score."""
    remarks = []
    if chosen_by is not None:
        remarks.append(
            f"Values are chosen by the {chosen_by} of one more seed; held-out scores "
            "are of examples that have chosen nothing."
        )
    if EDGE in shown:
        remarks.append(
            "An edge is the least or the largest of the values to choose from: a "
            "better one may lie beyond."
        )
    if UNFINISHED in shown:
        remarks.append(
            f"{UNFINISHED}: the budget was spent before the search had ended; with a "
            "larger one it goes on."
        )
    return remarks


def _common_headline(configs: Sequence[Config]) -> Headline:
    """The score that all configs have; before hours of training, as a table needs one.

    Raises:
      ValueError: if there is none, or two configs have the same name.
    """
    if not configs:
        raise ValueError(
            "give a config, or several, before all options: digits_allreduce "
            "digits_dadam_aer"
        )
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ValueError(f"each config needs a name of its own, got {names}")
    headlines = {build_task(config.task).headline for config in configs}
    if len(headlines) > 1:
        raise ValueError(
            "only configs of one task can be compared, got headline scores "
            f"{sorted(headline.name for headline in headlines)}"
        )
    return headlines.pop()


def _draw_entries(
    entries: Sequence[Entry],
    ends: Mapping[str, Sequence[float]],
    headline: Headline,
    units: Mapping[str, str],
    time: str,
    path: Path,
) -> None:
    score = _words(headline, units)
    losses = {
        one.name: [(ends[one.name][step], row) for step, row in one.outcome.losses]
        for one in entries
    }
    panels = [Panel(losses, time, label("training_loss", units))]
    panels += _held_out(entries, ends, headline.name, time, score)
    scores = {entry.name: entry.scores()[headline.name] for entry in entries}
    text = f"{score} ({headline.better} is better; dots are seeds)"
    save_svg(draw_comparison(panels, scores, text), path)


def _held_out(
    entries: Sequence[Entry],
    ends: Mapping[str, Sequence[float]],
    name: str,
    time: str,
    y_label: str,
) -> list[Panel]:
    """The curves of a score, where it was evaluated more than once."""
    rows = {
        one.name: [x for x in one.outcome.evaluations if name in x[1]]
        for one in entries
    }
    if max(map(len, rows.values())) < 2:
        return []

    def panel(x_label: str, x: Callable[[str, int, Mapping], float]) -> Panel:
        curves = {
            run: [(x(run, step, scores), scores[name]) for step, scores in found]
            for run, found in rows.items()
        }
        return Panel(curves, x_label, y_label)

    counts = [x for x in MORE_AXES if x in entries[0].scores()]
    return [
        panel(time, lambda run, step, _: ends[run][step]),
        *(
            panel(MORE_AXES[x], lambda _, __, scores, x=x: float(np.mean(scores[x])))
            for x in counts
        ),
    ]


def _write_tuning(bests: Mapping[str, Best], grid: Grid, out: Path) -> None:
    curves = {
        name: profiles(grid, best.tried, best.score) for name, best in bests.items()
    }
    score = next(iter(bests.values())).score
    text = f"{_words(score)} of one seed"
    values = dict(zip(grid.fields, grid.values, strict=True))
    save_svg(draw_tuning(curves, values, text), out / "tune.svg")
    write_whole(out / "tune.md", tuning_table(bests, grid) + "\n")
    print(f"        {out / 'tune.svg'}\ntried   {out / 'tune.md'}")


def _words(score: Headline, units: Mapping[str, str] = NO_UNITS) -> str:
    """What a score is called in a text."""
    where = "" if score.name == "training_loss" else "held-out "
    return f"{where}{label(score.name, units)}"


def _compared(own: Headline, score: str | None) -> Headline:
    """The score that is compared, by default the configs' own."""
    if score is None or score == own.name:
        return own
    return Headline(score, better="lower" if "loss" in score else "higher")


def _check_score(score: Headline, entry: Entry) -> None:
    if score.name not in entry.scores():
        raise ValueError(
            f"there is no score {score.name}; there are: {', '.join(entry.scores())}"
        )


def _varied(
    given: Path, change: Sequence[str], vary: Sequence[Sequence[str]]
) -> list[Config]:
    paths = matching_configs(given)
    chosen = [with_changes(load_config(path), change)[0] for path in paths]
    for field, *values in vary:
        if not values:
            raise ValueError(f"--vary needs a field and its values, got {field} alone")
        for config in chosen:
            _check_graphs(config, field, values)
        chosen = [_with(config, field, value) for config in chosen for value in values]
    return chosen


def _check_graphs(config: Config, field: str, values: Sequence[str]) -> None:
    """Raises a ValueError for values of a field that the graph does not have."""
    if not field.startswith("topology.") or len(values) < 2:
        return
    ones = [_with(config, field, value) for value in values]
    first, *others = (one.topology.build(one.workers) for one in ones)
    if all(other == first for other in others):
        raise ValueError(
            f"--{field} changes nothing: {config.topology.name} is one graph with "
            f"{' and '.join(values)}"
        )


def _with(config: Config, field: str, value: str) -> Config:
    """The config with one field set, as on the command line of `train`."""
    changed, _ = with_changes(config, [f"{field}={value}"])
    name = file_name(f"{config.name}-{field.rpartition('.')[2]}-{value}")
    return dataclasses.replace(changed, name=name)


def _ends(config: Config, seeds: range, clock: Clock) -> Sequence[float]:
    """When each number of steps is done, [T + 1], or without a clock the number."""
    if not clock.runs and not config.is_apart:
        return range(config.num_steps + 1)
    run = make_run(config)
    runs = [clock.run(run, seed).times for seed in seeds]
    return [0.0, *np.mean([times.end for times in runs], axis=(0, 2)).tolist()]


def _entry(
    config: Config,
    seeds: range,
    grid: Grid,
    train: Callable[[Config, Task, range, str], SeedsOutcome],
    score: Headline,
) -> tuple[Entry, Best]:
    """The results of a config at its best by a score."""

    def try_one(one: Config, task: Task, name: str) -> SeedsOutcome:
        return train(
            one, task, range(seeds.stop, seeds.stop + 1), f"{config.name}-{name}"
        )

    best = choose(config, build_task(config.task), grid, try_one, score)
    outcome = train(best.config, best.task, seeds, grid.results(config.name))
    draws = draws_of(best.config, seeds)
    return Entry(config.name, outcome, draws, best.say(grid)), best


def _trained(
    config: Config,
    task: Task,
    seeds: range,
    name: str,
    *,
    at_once: int | None,
    out: Path,
    clock: Clock,
    places: Iterator[str],
) -> SeedsOutcome:
    """The results of a config, from the folder or trained now."""
    title = f"{next(places)}: {name}"
    # Of peers each seed is a run of its own.
    is_late = config.is_apart
    size = 1 if is_late else seeds_at_once(config, len(seeds), at_once)
    # Each group of seeds takes all the steps.
    num_steps = math.ceil(len(seeds) / size) * config.num_steps

    def train() -> SeedsOutcome:
        with progress(title, num_steps) as report:
            run = make_run(config, task=task)
            return train_simulated(run, seeds, report, clock, at_once)

    facts = {"clock": clock.facts()} if is_late else {}
    return kept(out / f"{name}.json", config, seeds, train, facts)


def _with_fields(
    arguments: Sequence[str],
) -> tuple[list[str], Callable[..., None]]:
    """The options of a command line, and the comparison with the other fields set.

    `--vary FIELD VALUES`, of version 0.2, is `--FIELD VALUES`.
    """
    words = iter(arguments)
    given = [f"--{next(words, '')}" if word == "--vary" else word for word in words]
    rest, fields = take_fields(given)
    several = {field for field, values in fields.items() if len(values) > 1}
    change = [as_change(*one) for one in fields.items() if one[0] not in several]
    vary = [(field, *fields[field]) for field in fields if field in several]
    return rest, functools.partial(compare, change=tuple(change), vary=tuple(vary))


if __name__ == "__main__":
    with command():
        if not sys.argv[1:]:
            show_usage("usage: decentjax compare CONFIG.py [CONFIG.py ...]", [])
        args, varied = _with_fields(sys.argv[1:])
        from_options(varied, args=args, prog="decentjax compare", also=FIELDS)
