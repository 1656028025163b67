"""A run of peers: each trains in a folder of its own, and waits for no other."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decentjax import WorkerState, gossip, methods
from decentjax.process import phases
from decentjax.process.address import is_loopback, split_address, to_address
from train.cli.config_json import to_json
from train.config import (
    ApartExchange,
    Config,
    GroupExchange,
    PeerExchange,
    QuorumExchange,
)
from train.data.batches import Feed
from train.data.shard_feed import ShardFeed
from train.job.distributed import gather
from train.job.peer_address import address_of
from train.job.secret import put_back, read_secret, shared_secret
from train.plain_files import write_new
from train.run.nonfinite import WatchState
from train.run.resume import Begin, trained_by
from train.run.run_place import Apart
from train.run.setup import Run
from train.run.stop import Stop
from train.run.used_record import has_record
from train.store.checkpoints import (
    DamagedError,
    find_checkpoints,
    restore,
    verify,
)
from train.store.folder import MADE_AGAIN, process_folders, writing
from train.store.log import METRICS, Log, warn
from train.tasks.task import Task

JOIN_SECONDS = 5.0  # Wait for any peer, before a process continues from its own model.
START_SECONDS = 2.0  # The same for one that may well be the first.
AWAY = "was away, while others may have gone on"
NO_QUORUM = "waits for its quorum of workers"
# Fields of `exchange` in which peers may differ.
OWN = ("patience", "bind", "addresses", "seeds", "secret_file")


def has_begun(folder: Path) -> bool:
    """Whether this process was started before, or others have trained for long.

    As process 0 of its worker sees it: others write meanwhile.
    """
    others = process_folders(folder.parent)
    begun = (folder / METRICS).exists() or any(
        find_checkpoints(other).steps for other in others
    )
    return gather("begun", begun)[0]


def write_shared(run: Run) -> None:
    """Writes RUN/config.json; each process does, and all write the same."""
    config, folder = run.config, run.folder
    count = run.place.num_processes
    job = dataclasses.replace(config.distributed, process_id=None, num_processes=count)
    shared = dataclasses.replace(config, distributed=job)
    # Renamed from a name of its own: others may write theirs at the same time. Not in
    # the process's folder, which may be on a disk of its own.
    part = folder.parent / f".config.json.{folder.name}.part"
    write_new(part, to_json(shared))
    part.replace(folder.parent / "config.json")


def build_peers(
    run: Run,
    record: gossip.Record | None = None,
    used: Callable[[gossip.MergeRecord], None] | None = None,
) -> gossip.Peers:
    """The step of a process that exchanges models with its peers.

    Args:
      run: the run.
      record: called with the spans of each step.
      used: called with each average of models; by default the watch of its place.
    """
    config, place, method = run.config, run.place, run.method
    exchange, num_workers = config.exchange, config.workers.num_workers
    assert isinstance(exchange, ApartExchange)
    assert isinstance(place, Apart)
    bind, book = _bound(exchange, place)
    own = place.workers, place.mesh, digest(config), bind, _secret(exchange, place)
    party = gossip.PeerProcess(book, *own, exchange.encrypted)
    common: dict[str, Any] = {
        "patience": exchange.waits,
        "record": record,
        "used": used or place.watch.add,
    }
    if isinstance(exchange, PeerExchange | QuorumExchange) and place.elastic:
        build = functools.cache(config.topology.build_for)
        alone = JOIN_SECONDS if has_begun(place.folder) else START_SECONDS
        how = exchange.quorum_of(num_workers), exchange.silent_seconds, alone
        common["elastic"] = gossip.Elastic(build, *how, place.watch.read)
    plan = method.plan
    match exchange:
        case GroupExchange():
            plan = wagma_plan(run)
        case QuorumExchange():
            common["merge"] = exchange.build_merge(num_workers, amounts_of(run.task))
        case PeerExchange(way=way):
            common["merge"] = way
    return gossip.Peers(run.local, plan, party, **common)


def amounts_of(task: Task) -> Callable[[Any], list[int]]:
    """Returns a function of what a batch has of each worker, such as tokens."""
    count = task.amount.count

    def amounts(arrays: Any) -> list[int]:
        num_workers = len(jax.tree.leaves(arrays)[0])
        if num_workers == 1:
            return [count(arrays)]
        rows = (
            jax.tree.map(lambda x, i=i: x[i : i + 1], arrays)
            for i in range(num_workers)
        )
        return list(map(count, rows))

    return amounts


def _bound(
    exchange: ApartExchange, place: Apart
) -> tuple[str, gossip.Addresses | gossip.Folder | gossip.Seeds]:
    """Where this process listens, and the book in which it finds the others."""
    host, port = split_address(address_of(exchange.bind), port=0)
    bind = to_address(host, port and port + place.part)
    book = gossip.Folder(place.run_dir / "peers")
    if exchange.seeds:
        book = gossip.Seeds(exchange.seeds)
    if exchange.addresses:
        if len(exchange.addresses) != place.num_processes:
            raise ValueError(
                f"exchange.addresses must have one for each of {place.num_processes} "
                f"processes, got {len(exchange.addresses)}"
            )
        bind = to_address(*split_address(exchange.addresses[place.number]))
        # The workers of a process share its address.
        book = gossip.Addresses([x for x in exchange.addresses for _ in place.workers])
    if not (exchange.encrypted or is_loopback(split_address(bind, port=0)[0])):
        warn(
            f"listens at {bind}: who reaches this process can end it, and who is "
            "between the machines can read and change the models, as nothing is "
            "encrypted; set exchange.encrypted, or use a private network, see "
            "SECURITY.md"
        )
    return bind, book


def wagma_plan(run: Run) -> methods.Wagma:
    """The plan of a run with the exchange "groups"."""
    topology, num_workers = run.config.topology, run.config.workers.num_workers
    assert topology.mean_every is not None
    how = num_workers, topology.group_size, topology.mean_every
    return methods.wagma(*how, delay=int(run.method.is_early))


def digest(config: Config) -> str:
    """Returns a text of what all peers must share: what is trained, and by whom."""
    fields = json.loads(to_json(config))
    exchange = {k: v for k, v in fields["exchange"].items() if k not in OWN}
    return json.dumps({**trained_by(fields), "exchange": exchange}, sort_keys=True)


class Joiner(NamedTuple):
    """Takes a process of peers to where it continues: before each of its steps.

    All processes of a worker call it alike.

    Args:
      peers: the step.
      batches: its batches, which continue there too.
      last: latest step at which it can continue.
      log: log of this process; None but in the first of a worker.
      folder: folder of this process.
      stop: what ends a wait.
    """

    peers: gossip.Peers
    batches: Feed | ShardFeed
    last: int
    log: Log | None
    folder: Path
    stop: Stop

    def begin(self, begin: Begin, batch: Any, may_be_late: bool) -> Begin:
        """Returns where this process begins: its own state, or where its peers are.

        Args:
          begin: its own checkpoint, or a new state.
          batch: stacked batch of any step.
          may_be_late: whether others may have continued without it.
        """
        if not may_be_late:
            return self._admitted(begin, batch, may_be_late)
        self._note(begin.step, began=round(time.time(), 3))
        self._say("looks for peers that are further")
        found = self._admitted(begin, batch, may_be_late)
        if found.state is begin.state:
            how = f"goes on from its own step {begin.step}" if begin.step else "begins"
            self._say(f"no peer is further: {how}")
        if self.log is not None:
            self.log.forget(found.step)
        return found

    def admit(self, begin: Begin) -> Begin:
        """Returns where this process continues before a step: mostly where it is."""
        return self._admitted(begin, None, True)

    def _admitted(self, begin: Begin, batch: Any, may_be_late: bool) -> Begin:
        """The state and step with which the library, or a saved state, lets it go on.

        If no peer is alive, that is a peer's checkpoint, if that is further.
        """
        told = {AWAY} if batch is not None else set[str]()

        def ended() -> bool:
            why = AWAY if self.peers.has_quorum() else NO_QUORUM
            if why not in told:
                self._say(f"step {begin.step}: {why}")
            told.add(why)
            return self.stop.is_asked()

        with phases.phase(phases.WAITING):
            state, step, how = self.peers.admit(begin.state, batch, begin.step, ended)
        # Where it may have waited.
        if batch is not None or how == "alone" or not self.peers.has_quorum():
            self.stop.agree()
        step = min(step, self.last)
        match how:
            case "own":
                return begin
            case "behind":
                self._note(begin.step, skipped=step - begin.step)
                return self._at(begin, step)
            case "joined":
                return self._taken(begin, state, step, "a peer's model")
        saved = _saved_by_peers(self.folder, begin) if may_be_late else None
        if saved is None:
            return begin
        # Else a process absent at the end would keep a model that was never mixed.
        return self._taken(begin, *saved, "the model that a peer has saved")

    def _taken(self, begin: Begin, state: WorkerState, step: int, whose: str) -> Begin:
        step, moved = min(step, self.last), distance(state.params, begin.state.params)
        where = f"at step {step}, {moved:.3g} from its own"
        self._say(f"goes on with {whose} {where}")
        facts: dict[str, Any] = {}
        if whose == "a peer's model" and self.peers.joined_from:
            facts["joined_from"] = self.peers.joined_from
        self._note(step, joined_after=begin.step, moved=moved, **facts)
        return self._at(begin._replace(state=state), step)

    def _say(self, text: str) -> None:
        if self.log is not None:
            self.log.say(text)

    def _note(self, step: int, **facts: Any) -> None:
        if self.log is not None:
            self.log.note(step, **facts)

    def _at(self, begin: Begin, step: int) -> Begin:
        """A state and its batches at another step."""
        self.batches.set_step(step)
        return begin._replace(step=step, state=at_step(begin.state, step))


def _saved_by_peers(folder: Path, begin: Begin) -> tuple[WorkerState, int] | None:
    """The newest state that another process has saved, with the own random key.

    None if no other is whole and further.
    """
    others = [x for x in process_folders(folder.parent) if x != folder]
    saved = [(n, str(p)) for x in others for n, p in find_checkpoints(x).steps.items()]
    # As process 0 of its worker sees them: others save meanwhile.
    first, *_ = gather("saved by peers", [x for x in saved if x[0] > begin.step])
    for step, path in sorted(((n, Path(p)) for n, p in first), reverse=True):
        try:
            verify(path)
            state = restore(path, begin.state)
        except Exception as error:  # Its own process may be removing it.
            # Other processes of the worker may have read it.
            if jax.process_count() > 1 and not isinstance(error, DamagedError):
                raise
            warn(f"{path} {error}")
        else:
            return state._replace(key=begin.state.key), step
    return None


def distance(models: Any, others: Any) -> float:
    """Root mean square over the workers of the distance between two models."""
    # Where they are: a process may have a part of each alone.
    return float(_distance(jax.tree.leaves(models), jax.tree.leaves(others)))


@jax.jit
def _distance(models: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    pairs = zip(models, others, strict=True)
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32)))
        for x, y in pairs
    ]
    return jnp.sqrt(sum(squares, jnp.zeros(())) / len(models[0]))


def _secret(exchange: ApartExchange, place: Apart) -> bytes:
    """The secret of the run, of the file that is given or of the run's folder."""
    if exchange.secret_file is not None:
        return read_secret(Path(exchange.secret_file))
    if exchange.addresses or exchange.seeds:
        raise ValueError(
            "exchange.addresses and exchange.seeds are for processes that need no "
            "common folder, and so find no common secret: give all of them a copy of "
            "the same file with "
            "--exchange.secret-file PATH, made by (umask 077; openssl rand -hex 32 > "
            "PATH)"
        )
    others = process_folders(place.run_dir)
    return shared_secret(place.run_dir / "peers", any(map(has_record, others)))


def keeper(run: Run) -> Callable[[], None]:
    """Returns a function that puts the secret of the run back, if it was removed."""
    exchange, place, peers = run.config.exchange, run.place, run.place.run_dir / "peers"
    assert isinstance(exchange, ApartExchange)
    assert isinstance(place, Apart)
    if exchange.secret_file is not None:
        return lambda: None
    secret = _secret(exchange, place)

    def keep() -> None:
        with writing(peers):
            if put_back(peers, secret):
                warn(f"{peers / 'secret'} {MADE_AGAIN}")

    return keep


def at_step(state: WorkerState, step: int) -> WorkerState:
    """The state with the schedules of its optimizer, and the count of steps, at a step.

    Those inside `optax.MultiSteps` count its updates, and stay.
    """

    def moved(tree: Any) -> Any:
        def is_one(x: Any) -> bool:
            is_kept = isinstance(x, optax.MultiStepsState)
            return x is not tree and (is_kept or _count_of(x) is not None)

        tree = jax.tree.map(
            lambda x: moved(x) if _count_of(x) else x, tree, is_leaf=is_one
        )
        if (name := _count_of(tree)) is None:
            return tree
        count = getattr(tree, name)
        # Placed as it was.
        rows = np.full(count.shape, step, count.dtype)
        new = jax.make_array_from_callback(rows.shape, count.sharding, rows.__getitem__)
        return tree._replace(**{name: new})

    return state._replace(opt_state=moved(state.opt_state))


def _count_of(x: Any) -> str | None:
    """Name of the field of an optimizer's state that counts steps for a schedule."""
    if isinstance(x, optax.ConditionallyTransformState | optax.ConditionallyMaskState):
        return "step"
    others = (
        WatchState,
        optax.InjectHyperparamsState,
        optax.InjectStatefulHyperparamsState,
        optax.AddNoiseState,
    )
    # States of schedules themselves, some without a public name, have nothing else.
    is_one = isinstance(x, others) or getattr(x, "_fields", None) == ("count",)
    return "count" if is_one else None
