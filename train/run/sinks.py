"""Where a run's rows go beside metrics.jsonl: TensorBoard, wandb, Prometheus, ...

A sink is a function of the config, the run's folder and the step where it starts. It
returns a context, whose value takes each row: a step, and numbers by name.
"""

import contextlib
import fcntl
import functools
import importlib.util
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from train.cli.config_json import to_json
from train.config import Config
from train.run.prometheus import prometheus
from train.run.run_info import read_facts
from train.store.log import Write, warn

Sink = Callable[[dict[str, Any], Path, int], AbstractContextManager[Write]]
"""Maps the config's fields, the folder and the number of steps done to a context."""

MOST_ROWS = 10_000  # Of a sink that is behind, as of a server that does not answer.
END_SECONDS = 60.0
MOST_BYTES = 240  # Of a name in mlflow, whose files and databases take 250 or 255.
DATABASES = "sqlite", "mysql", "postgresql", "mssql"  # As mlflow's addresses begin.


@contextlib.contextmanager
def _tensorboard(config: dict[str, Any], run_dir: Path, start: int) -> Iterator[Write]:
    """Writes events into RUN/tensorboard."""
    # Where torch is installed this takes seconds.
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2, summary_pb2

    del config
    # It would warn at each number that is not finite.
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
    folder = run_dir / "tensorboard"
    messages, summaries = event_pb2, summary_pb2  # Their classes are made at run time.

    def add(writer: Any, step: int, **what: Any) -> None:
        writer.write_event(messages.Event(step=step, wall_time=time.time(), **what))

    def open_file() -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        # Not tensorboardX's own thread, which waits forever after an error.
        writer = event_file_writer.EventsWriter(str(folder / "events"))
        # Hides what an earlier process wrote of later steps.
        started = messages.SessionLog(status=messages.SessionLog.START)
        add(writer, start + 1, session_log=started)
        return stack.enter_context(contextlib.closing(writer))

    def write(step: int, values: dict[str, float]) -> None:
        nonlocal writer
        if not folder.exists():  # Removed while the run trains.
            writer = open_file()
        for tag, value in values.items():
            # Not tensorboardX's own, which gives names of other letters one name.
            one = summaries.Summary.Value(tag=tag, simple_value=value)
            add(writer, step, summary=summaries.Summary(value=[one]))
        writer.flush()

    with contextlib.ExitStack() as stack:
        writer = open_file()
        yield write


@contextlib.contextmanager
def _wandb(config: dict[str, Any], run_dir: Path, start: int) -> Iterator[Write]:
    """Logs to Weights & Biases; the id of the run lets a resumed one continue."""
    import wandb

    del start
    # It would ask for a key at the terminal, which the run shares.
    has_place = wandb.api.api_key or "WANDB_MODE" in os.environ
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", "decentjax"),
        mode=None if has_place else "offline",
        id=read_facts(run_dir)["id"],
        name=config["name"],
        dir=str(run_dir),
        config=config,
        resume="allow",
        settings=wandb.Settings(console="off"),
    ) as run:
        yield lambda step, values: run.log(values, step=step)


@contextlib.contextmanager
def _mlflow(config: dict[str, Any], run_dir: Path, start: int) -> Iterator[Write]:
    """Logs to the server or the folder of MLFLOW_TRACKING_URI."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    del start
    uri = _mlflow_uri()
    client, named = MlflowClient(uri, uri), _names_as_paths("mlflow")
    with _alone_at(uri):
        place = _mlflow_run(client, config, read_facts(run_dir)["id"])

    def write(step: int, values: dict[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [
            Metric(named(key), value, now, step) for key, value in values.items()
        ]
        client.log_batch(place, metrics)

    try:
        yield write
    except BaseException:
        client.set_terminated(place, "FAILED")
        raise
    client.set_terminated(place, "FINISHED")


def _mlflow_uri() -> str:
    """Where mlflow logs to; without a setting a folder, if it has no database."""
    import mlflow

    # Its newest version has folders only for who says so.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = mlflow.get_tracking_uri()
    has_databases = importlib.util.find_spec("sqlalchemy") is not None
    if not uri.startswith(DATABASES) or has_databases:
        return uri
    if mlflow.is_tracking_uri_set():
        raise ModuleNotFoundError(
            f"MLFLOW_TRACKING_URI is the database {uri}, which mlflow-skinny cannot "
            "use: pip install mlflow, or give a folder or a server"
        )
    return str(Path("mlruns").absolute())


def _mlflow_run(client: Any, config: dict[str, Any], own: str) -> str:
    """Returns mlflow's id of a run; one that resumes continues in its own."""
    from mlflow.entities import Param

    experiment = _mlflow_experiment(client)
    before = _mlflow_search(client, experiment, f"tags.`decentjax.id` = '{own}'")
    if before:  # Its params cannot change.
        return before[0].info.run_id
    tags, named = {"decentjax.id": own}, _names_as_paths("mlflow")
    run = client.create_run(experiment, tags=tags, run_name=config["name"])
    params = [Param(named(key), str(value)) for key, value in _flat(config).items()]
    client.log_batch(run.info.run_id, params=params)
    return run.info.run_id


def _mlflow_search(client: Any, experiment: str, words: str) -> Any:
    """Returns the runs that match; in a folder others may be writing theirs."""
    for pause in (0.02, 0.1, 0.5, 2.0):
        try:
            return client.search_runs([experiment], words)
        except ValueError:  # A metric's file has been created, and not yet written.
            time.sleep(pause)
    return client.search_runs([experiment], words)


def _mlflow_experiment(client: Any) -> str:
    """Returns the id of the experiment, which another process may create as well."""
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "decentjax"
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name)
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        warn(f"the experiment {name} of mlflow was deleted, and is restored")
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


@contextlib.contextmanager
def _alone_at(uri: str) -> Iterator[None]:
    """Keeps out other processes that begin in the same folder, or database in one.

    mlflow reads in folders what another is still writing, and creates an experiment
    twice.
    """
    with contextlib.ExitStack() as stack:
        if urlsplit(uri).scheme in ("", "file", "sqlite"):
            folder = Path(url2pathname(urlsplit(uri).path)).absolute().parent
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            with contextlib.suppress(OSError):  # Some file systems have no locks.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _names_as_paths(sink: str) -> Callable[[str], str]:
    """Returns a function that gives each name another, which may be a file's.

    One is never in the folder of another's name; a name that changes is said once.
    """
    given: dict[str, str] = {}

    def named(name: str) -> str:
        if name in given:
            return given[name]
        parts = re.sub(r"[^\w/.: -]", "_", name).split("/")
        path = "/".join(part if part.strip(".") else "_" for part in parts)
        path = path.encode()[:MOST_BYTES].decode(errors="ignore")
        while any(f"{x}/".startswith(f"{path}/") for x in given.values()) or any(
            f"{path}/".startswith(f"{x}/") for x in given.values()
        ):
            path = path.replace("/", "_") + "_"
        if path != name:
            warn(f"{sink} does not take the name {name!r}, and has {path!r} for it")
        return given.setdefault(name, path)

    return named


@contextlib.contextmanager
def _trackio(config: dict[str, Any], run_dir: Path, start: int) -> Iterator[Write]:
    """Logs to trackio, on this machine or in the Space of TRACKIO_SPACE_ID."""
    import trackio  # pyright: ignore[reportMissingImports]

    del start
    own = f"{config['name']}-{read_facts(run_dir)['id']}"
    run = trackio.init("decentjax", name=own, config=_flat(config), resume="allow")
    try:
        yield lambda step, values: run.log(values, step=step)
    finally:
        run.finish()


# The function of each name of `log.sinks`, and the package that it needs.
SINKS: dict[str, tuple[Sink, str]] = {
    "tensorboard": (_tensorboard, "tensorboardX"),
    "wandb": (_wandb, "wandb"),
    "mlflow": (_mlflow, "mlflow"),
    "trackio": (_trackio, "trackio"),
    "prometheus": (prometheus, "prometheus_client"),
}
OF_TRAIN = "tensorboard", "prometheus"  # Whose packages are always installed.

# They keep the rows of a run under its id, and forget none.
BY_ID = ("wandb", "mlflow", "trackio")


def named_sinks(names: Sequence[str]) -> list[Sink]:
    """Returns the sinks of these names, without importing their packages.

    Raises:
      ModuleNotFoundError: if a package is missing.
    """
    for name in names:
        _, package = SINKS[name]
        found = importlib.util.find_spec(package)
        # A folder "wandb" of an earlier run is found too, as a package without a file.
        if found is None or found.origin is None:
            raise ModuleNotFoundError(
                f"log.sinks has {name}, which is not installed: pip install "
                f"'decentjax[{'train' if name in OF_TRAIN else name}]'"
            )
    return [SINKS[name][0] for name in names]


def with_rows_before(
    sinks: Sequence[Sink], new: Sequence[str], rows: Sequence[tuple[int, Any]]
) -> list[Sink]:
    """Returns the sinks; those that have nothing of a run yet begin with earlier rows.

    Args:
      sinks: the sinks of a run that resumes.
      new: names of those that have none of its rows under its id.
      rows: step and numbers of the rows that the run keeps.
    """
    empty = [SINKS[name][0] for name in BY_ID if name in new]
    return [_after(rows, sink) if sink in empty else sink for sink in sinks]


def _after(rows: Sequence[tuple[int, Any]], sink: Sink) -> Sink:
    @functools.wraps(sink)
    @contextlib.contextmanager
    def after(config: dict[str, Any], run_dir: Path, start: int) -> Iterator[Write]:
        with sink(config, run_dir, start) as write:
            for row in rows:
                write(*row)
            yield write

    return after


@contextlib.contextmanager
def open_sinks(
    sinks: Sequence[Sink], config: Config, run_dir: Path, start: int
) -> Iterator[Write]:
    """Yields a function that gives a row to all sinks, and waits for none of them.

    Each runs in a thread of its own. One that fails is dropped with a warning.
    """
    fields = json.loads(to_json(config))
    with contextlib.ExitStack() as stack:
        writes = [
            stack.enter_context(_in_a_thread(sink, fields, run_dir, start))
            for sink in sinks
        ]

        def write(step: int, values: dict[str, float]) -> None:
            # Half an emoji cannot be encoded.
            values = {x.encode(errors="replace").decode(): values[x] for x in values}
            for one in writes:
                one(step, values)

        yield write


@contextlib.contextmanager
def _in_a_thread(
    sink: Sink, fields: dict[str, Any], run_dir: Path, start: int
) -> Iterator[Write]:
    # An error ends the sink's context as it ends the run, None as a run that is done.
    rows: queue.Queue[Any] = queue.Queue(MOST_ROWS)
    name = getattr(sink, "__name__", repr(sink)).strip("_")
    dropped = threading.Event()

    def drop(why: object) -> None:
        if not dropped.is_set():
            dropped.set()
            warn(f"the sink {name} is dropped, and the run continues without it: {why}")

    def work() -> None:
        row = None
        try:
            with sink(fields, run_dir, start) as write:
                while (row := rows.get()) is not None:
                    if isinstance(row, BaseException):
                        raise row
                    write(*row)
        except BaseException as error:
            if error is not row:
                drop(f"{type(error).__name__}: {error}")

    def put(row: Any) -> None:
        try:
            if not dropped.is_set():
                rows.put_nowait(row)
        except queue.Full:
            drop(f"it is {MOST_ROWS} rows behind")

    # A daemon: one that hangs does not keep the process alive.
    thread = threading.Thread(target=work, name=f"sink {name}", daemon=True)
    thread.start()
    end: BaseException | None = None
    try:
        yield lambda step, values: put((step, values))
    except BaseException as error:
        end = error
        raise
    finally:
        put(end)
        if not dropped.is_set():
            thread.join(END_SECONDS)
        if thread.is_alive():
            drop(f"it has not ended in {END_SECONDS:.0f} s")


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a config by their full names, "optimizer.learning_rate"."""
    flat = {}
    for name, value in fields.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return flat
