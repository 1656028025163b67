"""Compares configs over several seeds.

`decentjax compare CONFIG.py [...] --seeds 3 [--tune FIELD VALUE ... [--budget N]]`
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from matplotlib.figure import Figure

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
from train.cli.tables import file_name, label, to_csv
from train.config import Config
from train.figures.comparison_figure import Panel, draw_comparison, draw_tuning
from train.figures.style import Format, save_figure
from train.plain_files import write_whole
from train.run.check_task import score_names
from train.run.setup import make_run
from train.study.clock import Clock
from train.study.comparison import NO_UNITS, Compared, Entry, statements
from train.study.outcome import SeedsOutcome, kept
from train.study.replayed import train_simulated
from train.study.seeds import draws_of, seeds_at_once
from train.study.tune import (
    EDGE,
    UNFINISHED,
    Best,
    Candidate,
    Grid,
    choose,
    profiles,
    read_grid,
    tuning_table,
)
from train.tasks.task import Headline, build_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
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
      label: NAME=TEXT, what a config is called in tables, figures and compare.csv;
        repeat it for others.
      format: format of the figures.
      out: folder for all results, tables and figures.

    Raises:
      ValueError: if there is nothing to compare, or the field cannot hold a value.
    """

    configs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    seeds: int = 3
    first_seed: int = 0
    at_once: int | None = None
    change: Changes = ()
    vary: Annotated[tuple[tuple[str, ...], ...], tyro.conf.Suppress] = ()
    tune: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    budget: int | None = None
    score: str | None = None
    clock: Clock = dataclasses.field(default_factory=Clock)
    label: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    format: Format = "svg"
    out: Path = Path("runs/compare")

    def __post_init__(self):
        for name in ("seeds", "at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for one in self.label:
            if not all(one.partition("=")):
                raise ValueError(f"--label takes NAME=TEXT, got {one!r}")

    def run(self) -> None:
        """Trains what is missing, and writes and prints what all came to."""
        candidates = self._candidates()
        headline = self._headline(candidates)
        ends = [self._ends(one) for one in candidates]  # For its errors, before hours.
        configs = [one.config for one in candidates]
        (grid,) = {read_grid(self.tune, config, self.budget) for config in configs}
        self.out.mkdir(parents=True, exist_ok=True)
        # A config is trained with each choice of values, and with the best of them.
        total = len(candidates) * (grid.most + 1)
        most = "at most " if grid.budget else ""
        places = (f"{number} of {most}{total}" for number in itertools.count(1))
        found = [self._at_its_best(one, grid, headline, places) for one in candidates]
        entries, bests = zip(*found, strict=True)
        _check_score(headline, entries[0].scores())
        if grid.fields:
            ends = [self._ends(best.candidate) for best in bests]
        names, units = [entry.name for entry in entries], candidates[0].task.units
        by_name = dict(zip(names, ends, strict=True))
        results = Compared(entries, headline, units, by_name, self.clock.runs)
        self._write(results, grid, bests)

    def _candidates(self) -> list[Candidate]:
        """The configs with their tasks; before hours of training, as a table has one.

        Raises:
          ValueError: if there is none, or two have the same name.
        """
        configs = [
            config
            for given in self.configs
            for config in _varied(given, self.change, self.vary)
        ]
        if not configs:
            raise ValueError(
                "give a config, or several, before all options: digits_allreduce "
                "digits_dadam_aer"
            )
        names = [config.name for config in configs]
        labels = [self._label(name) for name in names]
        for of_each in (names, labels):
            if len(set(of_each)) < len(of_each):
                raise ValueError(f"each config needs a name of its own, got {of_each}")
        for name in self._labels:
            if name not in names:
                raise ValueError(
                    f"--label {name}=...: no config has this name; there are "
                    f"{', '.join(names)}"
                )
        return [Candidate(one, build_task(one.task), one.name) for one in configs]

    @property
    def _labels(self) -> dict[str, str]:
        pairs = [one.partition("=") for one in self.label]
        return {name: text for name, _, text in pairs}

    def _label(self, name: str) -> str:
        return self._labels.get(name, name)

    def _headline(self, candidates: Sequence[Candidate]) -> Headline:
        """The score that is compared, by default the one that all tasks have.

        Raises:
          ValueError: if they have none in common, or there is no such score.
        """
        headlines = {one.task.headline for one in candidates}
        if len(headlines) > 1:
            raise ValueError(
                "only configs of one task can be compared, got headline scores "
                f"{sorted(headline.name for headline in headlines)}"
            )
        (own,), score = headlines, self.score
        if score is None or score == own.name:
            return own
        found = Headline(score, better="lower" if "loss" in score else "higher")
        for one in candidates:
            if one.task.judge is None:  # Its scores are known when it has read a text.
                _check_score(found, [*score_names(one.task), "training_loss"])
        return found

    @property
    def _seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def _ends(self, one: Candidate) -> Sequence[float]:
        """When each number of steps is done, [T + 1], or without a clock the number."""
        config = one.config
        if not (self.clock.runs or self.clock.is_needed(config)):
            return range(config.num_steps + 1)
        run = make_run(config, task=one.task)
        runs = [self.clock.run(run, seed).times for seed in self._seeds]
        return [0.0, *np.mean([times.end for times in runs], axis=(0, 2)).tolist()]

    def _at_its_best(
        self, one: Candidate, grid: Grid, score: Headline, places: Iterator[str]
    ) -> tuple[Entry, Best]:
        """The results of a config at its best by a score."""

        def train(some: Candidate, seeds: range) -> SeedsOutcome:
            return self._train(some, seeds, next(places))

        seeds = self._seeds
        last = range(seeds.stop, seeds.stop + 1)
        best = choose(one, grid, lambda some: train(some, last), score)
        outcome = train(best.candidate, seeds)
        draws = draws_of(best.candidate.config, seeds)
        label = self._label(one.name)
        return Entry(label, outcome, draws, best.say(grid), one.name), best

    def _train(self, one: Candidate, seeds: range, place: str) -> SeedsOutcome:
        """The results of a config, from the folder or trained now."""
        config, task, name = one
        is_timed = self.clock.is_needed(config)
        size = 1 if is_timed else seeds_at_once(config, len(seeds), self.at_once)
        # Each group of seeds takes all the steps.
        num_steps = math.ceil(len(seeds) / size) * config.num_steps

        def train() -> SeedsOutcome:
            run = make_run(config, task=task)
            with progress(f"{place}: {name}", num_steps) as report:
                return train_simulated(run, seeds, report, self.clock, self.at_once)

        facts = {"clock": self.clock.facts()} if is_timed else {}
        return kept(self.out / f"{name}.json", config, seeds, train, facts)

    def _write(self, results: Compared, grid: Grid, bests: Sequence[Best]) -> None:
        """Writes tables and figures, and prints them."""
        shown = results.table((*grid.fields, "tried") if grid.fields else ())
        remarks = _remarks(shown, _words(bests[0].score) if grid.fields else None)
        said = statements(results.entries, results.headline)
        text = "\n\n".join([shown, *remarks, *said, *self._next(results)])
        write_whole(self.out / "compare.md", text + "\n")
        write_whole(self.out / "compare.csv", to_csv(results.rows(self._seeds)))
        figure = self.out / f"compare.{self.format}"
        save_figure(_draw(results), figure)
        print(f"\n{text}\n\nfigure  {figure}\nnumbers {self.out / 'compare.csv'}")
        if grid.fields:
            names = [entry.name for entry in results.entries]
            self._write_tuning(dict(zip(names, bests, strict=True)), grid)

    def _next(self, results: Compared) -> list[str]:
        """What to do next where values were compared that no other seed has chosen."""
        if not self.vary or self.tune:
            return []
        tune = " ".join(f"--tune {' '.join(one)}" for one in self.vary)
        return [
            f"Best {_words(results.headline)}: {results.best}. These seeds and "
            f"examples have chosen it: `{tune}` in place of the values lets others "
            f"choose, and --seeds {max(5, 2 * self.seeds)} shows smaller differences."
        ]

    def _write_tuning(self, bests: Mapping[str, Best], grid: Grid) -> None:
        curves = {
            name: profiles(grid, best.tried, best.score) for name, best in bests.items()
        }
        score = next(iter(bests.values())).score
        text = f"{_words(score)} of one seed"
        values = dict(zip(grid.fields, grid.values, strict=True))
        figure = self.out / f"tune.{self.format}"
        save_figure(draw_tuning(curves, values, text), figure)
        write_whole(self.out / "tune.md", tuning_table(bests, grid) + "\n")
        print(f"        {figure}\ntried   {self.out / 'tune.md'}")


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


def _draw(results: Compared) -> Figure:
    """Draws losses and scores over time, and the final scores."""
    headline, units, ends = results.headline, results.units, results.ends
    time = "seconds, simulated" if results.is_timed else "step"
    losses = {
        one.name: [(ends[one.name][step], row) for step, row in one.outcome.losses]
        for one in results.entries
    }
    panels = [Panel(losses, time, label("training_loss", units))]
    panels += _held_out(results, time)
    scores = {entry.name: entry.scores()[headline.name] for entry in results.entries}
    score = _words(headline, units)
    text = f"{score} ({headline.better} is better; dots are seeds)"
    return draw_comparison(panels, scores, text)


def _held_out(results: Compared, time: str) -> list[Panel]:
    """The curves of the score, if it was evaluated more than once."""
    name, y_label = results.headline.name, _words(results.headline, results.units)
    rows = {
        one.name: [x for x in one.outcome.evaluations if name in x[1]]
        for one in results.entries
    }
    if max(map(len, rows.values())) < 2:
        return []

    curves = {
        run: [(results.ends[run][step], scores[name]) for step, scores in found]
        for run, found in rows.items()
    }
    return [Panel(curves, time, y_label)]


def _words(score: Headline, units: Mapping[str, str] = NO_UNITS) -> str:
    """What a score is called in a text."""
    where = "" if score.name == "training_loss" else "held-out "
    return f"{where}{label(score.name, units)}"


def _check_score(score: Headline, names: Collection[str]) -> None:
    if score.name not in names:
        raise ValueError(
            f"there is no score {score.name}; there are: {', '.join(names)}"
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


def _with_fields(
    arguments: Sequence[str],
) -> tuple[list[str], dict[str, tuple]]:
    """The options of a command line, and what its fields change and vary."""
    rest, fields = take_fields(arguments)
    several = {field for field, values in fields.items() if len(values) > 1}
    change = [as_change(*one) for one in fields.items() if one[0] not in several]
    vary = [(field, *fields[field]) for field in fields if field in several]
    return rest, {"change": tuple(change), "vary": tuple(vary)}


if __name__ == "__main__":
    with command():
        if not sys.argv[1:]:
            show_usage("usage: decentjax compare CONFIG.py [CONFIG.py ...]", [])
        args, varied = _with_fields(sys.argv[1:])
        prog = "decentjax compare"
        given = from_options(Comparison, args=args, prog=prog, also=FIELDS)
        dataclasses.replace(given, **varied).run()
