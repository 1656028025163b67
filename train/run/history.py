"""A run as recorded in its folder, without its models."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decentjax.plan import topology_of
from decentjax.topology import Topology
from train.cli.config_json import make, read_fields
from train.cli.trust import find_own
from train.config import TopologyConfig, WorkersConfig, build_plan
from train.run.run_info import FACTS, read_facts
from train.store.folder import check_run, process_folders
from train.store.log import METRICS, read_metrics
from train.store.timeline import ActivitySpan, read_timelines


@dataclasses.dataclass(frozen=True)
class History:
    """The config and everything that a run has logged.

    Args:
      folder: folder of the run.
      config: fields of config.json; those of another version are kept.
      rows: rows of metrics.jsonl.
      spans: spans of timeline.*.jsonl, of the processes that recorded any.
      processes: of a run of peers, the history of each process, which has the rows.
      facts: facts of run.json, see `train.run.run_info`; of peers, those of the first.
    """

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    spans: list[ActivitySpan]
    processes: "tuple[History, ...]" = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        folder = self.folder.resolve()
        # Of peers it is the run that has a name.
        is_process = folder.name.startswith("process-")
        return f"{folder.parent.name}/{folder.name}" if is_process else folder.name

    def parts(self) -> "tuple[History, ...]":
        """The processes of a run of peers, else the run itself."""
        return self.processes or (self,)

    def curve(self, field: str, against: str) -> tuple[list[float], list[float]]:
        """A field of the training rows, against "step" or "seconds"."""
        rows = [row for row in self.rows if field in row]
        return [row[against] for row in rows], [row[field] for row in rows]

    @property
    def headline(self) -> str:
        """Name of the main score, which an early version did not record; "" of none."""
        names = (name for row in self.rows for name in row.get("mean_model", ()))
        return self.facts.get("headline") or next(names, "")

    def evaluations(self) -> list[dict[str, Any]]:
        """The rows with scores, the main one among them."""
        name = self.headline
        return [row for row in self.rows if name in row.get("mean_model", ())]

    def unit(self, score: str) -> str:
        """The unit of the loss or of a score, "" where none is known."""
        return self.facts.get("units", {}).get(score, "")

    def topology(self, trust: Sequence[str] = ()) -> Topology:
        """The topology; of a function of the user's own, whose module is trusted."""
        # Not `from_fields`, which would refuse other fields of an older version.
        try:
            topology = make(TopologyConfig, self.config["topology"], trust)
            workers = make(WorkersConfig, self.config["workers"])
            if isinstance(place := self.config.get("method"), str):
                plan = build_plan(find_own(place, trust, "method"), workers.num_workers)
                return topology_of(plan)
            return topology.build(workers)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.folder} has the config of another version: {error}"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.folder}/config.json: {error}") from error


def read_history(run_dir: Path) -> History:
    """Reads the folder of a run.

    Raises:
      ValueError: if the folder holds no run, or no row has its headline.
    """
    check_run(run_dir)
    # A process that has only begun has no rows yet, and may have no config.
    folders = [path for path in process_folders(run_dir) if read_metrics(path)]
    processes = tuple(map(read_history, folders))
    rows = read_metrics(run_dir)
    if not rows and not processes:
        raise ValueError(f"{run_dir} has no rows in {METRICS} yet")
    config, spans = read_fields(run_dir / "config.json"), read_timelines(run_dir)
    facts = processes[0].facts if processes else read_facts(run_dir)
    history = History(run_dir, config, rows, spans, processes, facts)
    scored = [row["mean_model"] for row in rows if "mean_model" in row]
    if scored and not history.evaluations():
        raise ValueError(
            f"{run_dir / FACTS}: headline must be a score in {METRICS}, one of "
            f"{', '.join(scored[-1])}, got {history.headline!r}"
        )
    return history
