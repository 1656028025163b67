"""The results of a run with several seeds, joined from several runs, and stored."""

import contextlib
import datetime
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from train.cli.config_json import HOOKS, from_fields, sources, to_json
from train.cli.tables import measured, plain
from train.config import Config
from train.fields import fits
from train.job.distributed import gather
from train.job.provenance import Provenance, provenance_changes, provenance_of
from train.plain_files import read_object, write_whole

Report = Callable[[int, str], None]
"""A function of the number of steps done and a phrase, for a progress line."""

Group = TypeVar("Group")
SeedNumbers = list[float | None]
# What a file has of an outcome, and of its rows beside their step.
FORMS: dict[str, Any] = {
    "seconds": float,
    **dict.fromkeys(("training_loss", "consensus_distance"), SeedNumbers),
    **dict.fromkeys(("judged", "sent"), dict[str, SeedNumbers]),
    "workers": dict[str, list[SeedNumbers]],
    "tensors": list[str],
    **dict.fromkeys(("losses", "evaluations", "dispersion"), list[list[Any]]),
}
ROWS = {
    "losses": SeedNumbers,
    "evaluations": dict[str, SeedNumbers],
    "dispersion": dict,
}


class SeedsOutcome(NamedTuple):
    """The results of K seeds of a run.

    Args:
      seconds: seconds of training, compilation included.
      losses: rows (step, mean training loss of each seed since the last row).
      training_loss: mean over the last tenth of the steps, [K].
      evaluations: rows (step, scores of the mean model of each seed by name).
      judged: final scores of what each mean model generates, by name.
      workers: final scores of each worker's model by name, [K, N].
      consensus_distance: final consensus distance, [K].
      tensors: names of the model's tensors, [L].
      dispersion: rows (step, for each measure how far the workers' norms are apart
        before they are averaged, [K, L], and under "consensus_distance" how far their
        tensors are apart after the step).
      sent: means over the steps, [K]: "connections" of a worker, and bytes sent "per
        worker" and "per link" of a node, by the busiest one.
    """

    seconds: float
    losses: list[tuple[int, list[float]]]
    training_loss: list[float]
    evaluations: list[tuple[int, dict[str, list[float]]]]
    judged: dict[str, list[float]]
    workers: dict[str, list[list[float]]]
    consensus_distance: list[float]
    tensors: list[str]
    dispersion: list[tuple[int, dict[str, list[list[float]]]]]
    sent: dict[str, list[float]]


def finite_mean(
    losses: np.ndarray, axis: int | tuple[int, ...] | None = None
) -> np.ndarray:
    """Returns the mean of the losses that are finite, NaN of none.

    A worker drops its update where its loss is not finite, or the run ends.
    """
    finite = np.isfinite(losses)
    with np.errstate(invalid="ignore"):
        return np.where(finite, losses, 0).sum(axis) / finite.sum(axis)


def in_turn(
    train: Callable[[Group, Report], SeedsOutcome],
    groups: Iterable[Group],
    num_steps: int,
    report: Report,
) -> SeedsOutcome:
    """Trains groups of seeds one after the other, and joins what they come to.

    Args:
      train: function of a group and its own progress.
      groups: seeds that are trained together.
      num_steps: number of steps of each group.
      report: progress of all.
    """

    def of_group(number: int, group: Group) -> SeedsOutcome:
        before = number * num_steps
        return train(group, lambda step, words: report(before + step, words))

    outcomes = [of_group(number, group) for number, group in enumerate(groups)]
    return functools.reduce(join, outcomes)


def join(a: SeedsOutcome, b: SeedsOutcome) -> SeedsOutcome:
    """The results of the seeds of both."""
    return SeedsOutcome(*map(_joined, a, b))._replace(tensors=a.tensors)


def _joined(x: Any, y: Any) -> Any:
    """The numbers of all seeds, in dicts and rows (step, numbers); a time is a sum."""
    match x:
        case dict():
            return {name: _joined(x[name], y[name]) for name in x}
        case [tuple(), *_]:
            rows = zip(x, y, strict=True)
            return [(step, _joined(p, q)) for (step, p), (_, q) in rows]
    return x + y


def kept(
    path: Path,
    config: Config,
    seeds: range,
    train: Callable[[], SeedsOutcome],
    facts: Mapping[str, Any] | None = None,
) -> SeedsOutcome:
    """Returns the results in a file, if they are of just this run, or trains it.

    All processes of a job call it, and the first writes the file.

    Args:
      path: file of the results.
      config: config of the run.
      seeds: its seeds.
      train: function that trains it.
      facts: what else the results depend on.
    """
    wanted = {"config": _trained(config), "seeds": list(seeds), **(facts or {})}
    now = provenance_of(config)
    outcome, changed = _read(path, wanted, now, sources(config))
    # A folder may not yet show each the file.
    found = gather("results", outcome is not None)
    if outcome is not None and all(found):
        if jax.process_index() == 0:
            at = datetime.datetime.fromtimestamp(path.stat().st_mtime)
            print(f"{path.stem}: from {path}, kept {at:%Y-%m-%d %H:%M}")
        return outcome
    if changed and jax.process_index() == 0:
        print(f"{path.stem}: trained again, as {', '.join(changed)}")
    outcome = train()
    made_by = {"provenance": now._asdict()}
    text = json.dumps({**wanted, **made_by, "outcome": plain(outcome)}, indent=2)
    if jax.process_index() == 0:
        write_whole(path, text)
    return outcome


def _trained(config: Config) -> dict[str, Any]:
    """The fields of a config that decide what it trains, as JSON has them."""
    fields = json.loads(to_json(config))
    del fields["distributed"], fields["workers"]["where"]
    return {name: value for name, value in fields.items() if name not in HOOKS}


def _read(
    path: Path, wanted: Mapping[str, Any], now: Provenance, trust: Sequence[str]
) -> tuple[SeedsOutcome | None, list[str]]:
    """The results in a file, or what has changed since they were kept."""
    if not path.exists():
        return None, []
    found = read_object(path)
    # An older version of this program has fewer fields: they have their defaults.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found["config"] = _trained(from_fields(found["config"], trust))
    # Another version may have kept other results.
    is_whole = _is_whole(found.get("outcome"), len(wanted["seeds"]))
    if not is_whole or {name: found.get(name) for name in wanted} != wanted:
        return None, []
    if "provenance" not in found:
        return None, ["an earlier version kept it"]
    if changed := provenance_changes(found["provenance"], now):
        return None, changed
    return SeedsOutcome(**measured(found["outcome"])), []


def _is_whole(outcome: Any, num_seeds: int) -> bool:
    """Whether a file has an outcome of some seeds, of which at least one was scored."""
    if not isinstance(outcome, dict) or outcome.keys() != FORMS.keys():
        return False
    if not all(fits(outcome[name], form) for name, form in FORMS.items()):
        return False
    rows = [(row, form) for name, form in ROWS.items() for row in outcome[name]]
    if not all(len(row) == 2 and fits(row[1], form) for row, form in rows):
        return False
    scores = [x for _, row in outcome["evaluations"] for x in row.values()]
    of_seeds = [outcome["training_loss"], *scores, *outcome["judged"].values()]
    return bool(scores) and all(len(x) == num_seeds for x in of_seeds)
