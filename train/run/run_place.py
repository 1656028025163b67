"""The place of a run: one process, a job of several, or one of several peers."""

import contextlib
import functools
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from decentjax import worker_mesh
from decentjax.distributed.credentials import check_credentials
from decentjax.distributed.devices import provide_cpu_devices, provide_devices
from decentjax.distributed.failure import set_worker
from decentjax.distributed.join import join
from decentjax.distributed.place import JobPlace, WorkerPlace, find_worker
from decentjax.distributed.watch import watch
from decentjax.placement import local_workers
from decentjax.process import phases
from train.cli.config_json import read_fields
from train.config import ApartExchange, BackgroundExchange, Config
from train.job.distributed import (
    detect,
    devices_per_process,
    fail_stop,
    job_mesh,
    leave,
    meet,
    start,
    workers_per_process,
)
from train.job.peer_address import check_addresses
from train.job.signals import NOTHING_LOST, ended_by_signals, stop_together
from train.run.peer_log import Watch, senders
from train.store.checkpoints import find_checkpoints
from train.store.folder import check_links, process_folders


class Alone:
    """One process, whose workers share a device or have a device each.

    Args:
      config: config of the run.
      run_dir: folder of the run; unused by a run that writes none.
    """

    watch: Watch | None = None  # What a process learns of its peers.

    def __init__(self, config: Config, run_dir: Path = Path()):
        self._config, self.run_dir = config, run_dir

    @property
    def process(self) -> int:
        """Number of this process."""
        return jax.process_index()

    @property
    def count(self) -> int:
        """Number of all processes; a worker of peers counts as one."""
        return jax.process_count()

    @property
    def num_processes(self) -> int:
        """Number of all processes, of the workers of peers too."""
        return self.count

    @property
    def part(self) -> int:
        """Number of this process among the ones that share its folder as a worker."""
        return 0

    @property
    def name(self) -> str:
        """Name of this process in names of files: its number, and its part."""
        return f"{self.process}.{self.part}" if self.part else str(self.process)

    @property
    def elastic(self) -> bool:
        """Whether processes of the run may join and leave."""
        exchange = self._config.exchange
        return isinstance(exchange, ApartExchange) and exchange.elastic

    @property
    def first(self) -> int:
        """Number of the worker of the first row of arrays."""
        return 0

    @property
    def workers(self) -> Sequence[int]:
        """Numbers of the workers of this process."""
        if self.mesh is None:
            return range(self._config.workers.num_workers)
        return [self.first + number for number in local_workers(self.mesh)]

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """The devices of the workers, of peers its own; None if they are simulated.

        Raises:
          ValueError: if simulated workers are to exchange in a second thread, or to
            have several devices.
        """
        workers = self._config.workers
        if workers.processes_per_worker > 1:
            raise ValueError(
                "workers.processes_per_worker = "
                f"{workers.processes_per_worker} is for a job of several processes: "
                "start them with `decentjax launch`, or set it to 1"
            )
        if workers.where == "mesh":
            return worker_mesh(workers.num_workers, None, workers.devices_per_worker)
        if workers.devices_per_worker > 1:
            raise ValueError(
                "simulated workers share one device, got devices_per_worker = "
                f'{workers.devices_per_worker}: set workers.where = "mesh", or start '
                "several processes"
            )
        if isinstance(self._config.exchange, BackgroundExchange):
            raise ValueError(
                'simulated workers send nothing: exchange = "background" needs '
                'workers.where = "mesh", or several processes'
            )
        return None

    @functools.cached_property
    def folder(self) -> Path:
        """The folder into which this process writes.

        Raises:
          ValueError: if it holds a run of another kind.
        """
        if process_folders(self.run_dir):
            raise ValueError(
                f"{self.run_dir} holds a run of peers: go on with --exchange peers, "
                "or choose another folder with --run-dir"
            )
        return self.run_dir

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Gives this process its devices, before anything has used one."""
        workers, deadline = self._config.workers, self._config.distributed.deadline
        if workers.where == "mesh":
            provide_cpu_devices(workers.num_workers * workers.devices_per_worker)
        if deadline is not None:
            watch(deadline)
        yield

    def finish(self) -> bool:
        """Ends the training of all processes; returns whether this one has results."""
        # Process 0 plots and scores for longer than jax lets its peers wait at exit.
        is_watched = self.count > 1 or self._config.distributed.deadline is not None
        leave()
        if self.process == 0 and is_watched:
            watch(self._config.distributed.deadline)
            phases.note(phases.RESULTS)
        return self.process == 0

    def phrase(self, in_thread: bool) -> str:
        """Where models are exchanged."""
        if self.mesh is None:
            return "simulated on one device"
        return f"exchanged in {'a second thread' if in_thread else 'the compiled step'}"


class Given(Alone):
    """A mesh, or one device for all workers, whatever the config says.

    Args:
      config: config of the run.
      given: the mesh; None simulates the workers.
    """

    def __init__(self, config: Config, given: Mesh | None = None):
        super().__init__(config)
        self._given = given

    @property
    def mesh(self) -> Mesh | None:
        return self._given


class InJob(Alone):
    """One of several processes that are a job of jax.distributed."""

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices of all workers, if the processes agree on the run."""
        return job_mesh(self._config.workers, meet(self._config))

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Joins the other processes."""
        config = self._config
        with fail_stop():
            start(config.distributed, config.workers, self.run_dir)
            # jax has taken over SIGTERM, which it passes on to jobs of several.
            alone = self.count == 1
            stops = ended_by_signals(NOTHING_LOST, but=[signal.SIGINT])
            with stops if alone else contextlib.nullcontext():
                yield


class Apart(Alone):
    """One of several peers, which have no coordinator: each process is a separate run.

    So is each worker of several processes, a job of its own, which counts as one here.
    RUN/process-K is the folder of process, or worker, K, with its own lock, log and
    checkpoints; RUN/peers has the addresses of the workers, RUN/config.json what all
    share.

    Raises:
      ValueError: if it has no place, or the workers do not divide among the processes.
    """

    @functools.cached_property
    def _place(self) -> JobPlace:
        if not self._config.distributed.enabled:
            raise ValueError(
                'exchange = "peers" is for several processes: start them with '
                "`decentjax launch`, or each with --distributed.enabled"
            )
        return detect("unused", self._config.distributed)  # Peers have no coordinator.

    @functools.cached_property
    def _in_worker(self) -> WorkerPlace:
        return find_worker(self._place, self._config.workers.processes_per_worker)

    @property
    def number(self) -> int:
        """Number of this process among the processes of all workers."""
        return self._place.process_id

    @property
    def num_processes(self) -> int:
        return self._place.num_processes

    @property
    def process(self) -> int:
        return self._in_worker.worker

    @property
    def count(self) -> int:
        return self._in_worker.num_workers

    @property
    def part(self) -> int:
        return self._in_worker.job.process_id

    @property
    def first(self) -> int:
        return self.workers.start

    @functools.cached_property
    def workers(self) -> range:
        devices_per_process(self._config.workers, self.num_processes)
        each = workers_per_process(self._config.workers.num_workers, self.count)
        return range(self.process * each, (self.process + 1) * each)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices of its workers, if the processes of a worker agree on the run."""
        if jax.process_count() > 1:
            meet(self._config)
        slices = self._config.workers.devices_per_worker
        return worker_mesh(len(self.workers), devices_per_worker=slices)

    @functools.cached_property
    def watch(self) -> Watch:
        """What this process learns of its peers."""
        others = set(range(self._config.workers.num_workers)) - {*self.workers}
        if not self.elastic:
            others = senders(self._config.graph, self.workers)
        return Watch(len(self.workers), others)

    @functools.cached_property
    def folder(self) -> Path:
        run_dir, path = self.run_dir, self.run_dir / "config.json"
        if find_checkpoints(run_dir).steps:
            raise ValueError(
                f"{run_dir} holds a run without peers: choose another folder with "
                f"--run-dir, and its model with --init-from {run_dir}"
            )
        check_links(run_dir)
        if path.exists():
            try:
                fields = read_fields(path)
                count = fields["distributed"]["num_processes"]
                count //= fields["workers"].get("processes_per_worker", 1)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} does not have num_processes") from error
            if count != self.count:
                raise ValueError(
                    f"{run_dir} is a run of {count} processes, got {self.count}: "
                    "start as many, or choose another folder with --run-dir"
                )
        return run_dir / f"process-{self.process}"

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        assert isinstance(self._config.exchange, ApartExchange)
        check_addresses(self._config.exchange)
        job, how = self._in_worker.job, self._config.distributed
        each = devices_per_process(self._config.workers, self.num_processes)
        if job.num_processes == 1:
            provide_devices(job.local_id, each)
            watch(how.deadline, self.process)
            yield
            return
        set_worker(self.process)
        with fail_stop():
            check_credentials()
            seconds = how.deadline, how.start_seconds
            join(job, each, *seconds, self.run_dir, stop_together())
            yield

    def finish(self) -> bool:
        leave()
        return False  # The models of all are in several folders.

    def phrase(self, in_thread: bool) -> str:
        del in_thread
        return "from peer to peer"


def build_place(config: Config, run_dir: Path = Path()) -> Alone:
    """Returns the place of a run in this process, before a device is used."""
    if config.is_apart:
        return Apart(config, run_dir)
    return (InJob if config.distributed.enabled else Alone)(config, run_dir)
