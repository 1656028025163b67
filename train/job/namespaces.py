"""An emulated cluster: network namespaces of this machine, with links of limited rate.

All namespaces are anonymous and live as long as the processes inside them, so the
kernel removes the cluster however the job ends.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from decentjax.distributed.place import worker_variables
from decentjax.units import rate as bytes_per_second
from train.cli.command import command
from train.job.cores import check_cores, core_shares
from train.job.processes import Process, describe_exit, die_with_parent, worker_name
from train.job.signals import STOP_SIGNALS, hold_stop_signals, pass_stop_signals_to
from train.network import GBIT, Rate

if sys.platform != "linux":
    raise SystemExit("error: an emulated cluster needs Linux")
try:
    from pyroute2 import IPRoute, NetlinkError
except ModuleNotFoundError as error:
    raise SystemExit(
        "error: an emulated cluster needs its extra: pip install 'decentjax[emulate]'"
    ) from error

INTERFACE = "eth0"  # The name in each node.
# Not the machine's own: BBR lets twice rate x delay be on its way, next to nothing on
# links without a delay, and confirmations wait behind the data of the other direction.
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
BURST_SECONDS = 0.01  # Size of the token bucket, as time at the link's rate ...
MIN_BURST_BYTES = 2**15  # ... but at least a few packets, or a slow link sends none.
QUEUE_SECONDS = 0.4  # Size of the queue, as time at the link's rate.
MIN_RATE, MAX_RATE = 1e-6 * GBIT, 32 * GBIT  # What the token bucket can count.
FIRST_PORT = 20000  # Of those at which workers meet, below the kernel's own choice.

_CLONE_NEWNS, _CLONE_NEWUTS = 0x00020000, 0x04000000  # <linux/sched.h>
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18  # <linux/mount.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmulatedCluster:
    """Runs COMMAND once per process on an emulated cluster, with srun's environment.

    Args:
      nodes: number of nodes, named node0, node1, ...; each has its own address and
        link.
      workers_per_node: number of workers per node.
      processes_per_worker: number of processes of each worker.
      rate: rate of each node's link, in each direction: a number and kbit, mbit or gbit
        per second, or "none" for no limit.
      distribution: placement of the workers, each on one node: "block" fills a node
        before the next, "cyclic" assigns them to the nodes in turn.
      threads_per_worker: number of compute threads per worker, in jax and OpenMP.
      cores: processor time of each worker, in cores, such as 0.2: time that a worker
        waits is then lost, as on machines of their own; None shares this machine's.
    """

    nodes: int
    workers_per_node: int = 1
    processes_per_worker: int = 1
    rate: Rate = "none"
    distribution: Literal["block", "cyclic"] = "block"
    threads_per_worker: int = 1
    cores: float | None = None

    def __post_init__(self):
        if not 1 <= self.nodes <= 254:
            raise ValueError(f"nodes must be between 1 and 254, got {self.nodes}")
        counts = "workers_per_node", "processes_per_worker", "threads_per_worker"
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.cores is not None:
            check_cores(self.cores)
        parse_rate(self.rate)

    @property
    def num_workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def num_processes(self) -> int:
        return self.num_workers * self.processes_per_worker


class Nodes:
    """The nodes of an emulated cluster, as seen from its switch.

    Args:
      cluster: the cluster.
      entries: open files of each node's network and host name.
      groups: by which file a worker gets its processor time, none where it is shared.
    """

    def __init__(
        self,
        cluster: EmulatedCluster,
        entries: list[tuple[int, int]],
        groups: Sequence[Path] = (),
    ):
        self._cluster, self._entries, self._groups = cluster, entries, groups
        self._ports = itertools.count(FIRST_PORT)

    def processes(self, argv: Sequence[str]) -> list[Process]:
        """Returns all processes for one more start, to run with `run_job`.

        The processes of each worker meet at a port that none has used before.
        """
        each, count = self._cluster.processes_per_worker, self._cluster.num_workers
        ports = [next(self._ports) for _ in range(count)]
        return [self.worker(i, argv, ports[i // each]) for i in range(count * each)]

    def worker(self, rank: int, argv: Sequence[str], port: int = 0) -> Process:
        """Returns the process of a rank, a whole worker if that has one process.

        Run it with `run_job`, or with its argv, and with its env in addition to ours.

        Args:
          rank: its number.
          argv: program and arguments.
          port: where its worker meets, if that has several processes.
        """
        env, each = environment(self._cluster, rank), self._cluster.processes_per_worker
        net, uts = map(_path_of, self._entries[int(env["SLURM_NODEID"])])
        enter = ["nsenter", f"--net={net}", f"--uts={uts}"]
        if self._groups:
            group = str(self._groups[rank // each])
            enter += ["sh", "-c", 'echo 0 >"$0" && exec "$@"', group]
        env |= worker_variables(each, port)
        name = worker_name(rank, each)
        return Process(str(rank), [*enter, *argv], env, worker=name)

    def set_link(self, node: int, up: bool) -> None:
        """Connects a node to the switch, or takes its link down."""
        with IPRoute() as ip:
            state = "up" if up else "down"
            ip.link("set", index=_index(ip, f"node{node}"), state=state)


def in_cluster(cluster: EmulatedCluster, job: Callable[[Nodes], int]) -> int:
    """Builds the cluster, runs job(nodes) in its switch, and returns its exit code.

    The job runs in a fork of this process with its own network and process ids, so call
    this before any thread starts. All its processes end with it. SIGTERM and Ctrl-C end
    it by SystemExit.

    Raises:
      PermissionError: if this process may not create namespaces.
    """

    def send(signum: int, _: int) -> None:
        assert switch.pid is not None
        if switch.is_alive():
            os.kill(switch.pid, signum)

    with contextlib.ExitStack() as stack:
        with hold_stop_signals(), open("/proc/self/ns/pid") as own_pids:
            # No signal ends this process before the groups are removed.
            stack.enter_context(pass_stop_signals_to(send))
            groups: list[Path] = []
            if cluster.cores is not None:
                shares = core_shares(cluster.num_workers, cluster.cores)
                groups = stack.enter_context(shares)
            switch = multiprocessing.get_context("fork").Process(
                target=_run_in_switch, args=(cluster, job, groups)
            )
            try:
                # The next child is the first process of a new pid namespace. Later
                # children of this process stay in ours: setns below takes it back.
                _call(_LIBC.unshare, _CLONE_NEWPID)
            except PermissionError as error:
                raise PermissionError(
                    f"an emulated cluster needs root, for its namespaces ({error})"
                ) from error
            switch.start()
            _call(_LIBC.setns, own_pids.fileno(), _CLONE_NEWPID)
        switch.join()
    assert switch.exitcode is not None
    code, how = describe_exit(switch.exitcode)
    if switch.exitcode < 0:
        print(f"error: the emulated cluster was {how}", file=sys.stderr)
    return code


def environment(cluster: EmulatedCluster, rank: int) -> dict[str, str]:
    """Returns the variables that srun and torchrun set for the process of this rank."""
    each = cluster.processes_per_worker
    worker, in_worker = divmod(rank, each)
    if cluster.distribution == "block":
        node, in_node = divmod(worker, cluster.workers_per_node)
    else:
        in_node, node = divmod(worker, cluster.nodes)
    local_rank = in_node * each + in_worker
    threads = max(1, cluster.threads_per_worker // each)
    nodes = "node0" if cluster.nodes == 1 else f"node[0-{cluster.nodes - 1}]"
    return {
        "SLURM_JOB_ID": "1",  # jax's port is 61440 + 1, free in a new network.
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(cluster.nodes),
        "SLURM_NTASKS": str(cluster.num_processes),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "MASTER_ADDR": _address(0),
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(cluster.num_processes),
        "RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(cluster.workers_per_node * each),
        "LOCAL_RANK": str(local_rank),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NPROC": str(threads + 1),  # One more thread sends messages.
        "OMP_NUM_THREADS": str(threads),
    }


def parse_rate(rate: str) -> float | None:
    """Returns bytes per second, or None if there is no limit.

    Raises:
      ValueError: if it is no rate, or the kernel's token bucket cannot count it.
    """
    if rate == "none":
        return None
    try:
        parsed = bytes_per_second("rate", rate)
    except ValueError:
        parsed = 0
    if not MIN_RATE <= parsed <= MAX_RATE:
        raise ValueError(
            f"rate must be like 200mbit, from 1kbit to 32gbit, or none, got {rate!r}"
        )
    return parsed


def _run_in_switch(
    cluster: EmulatedCluster, job: Callable[[Nodes], int], groups: Sequence[Path]
) -> None:
    """Runs as pid 1 of the cluster: the kernel ends all others when it ends."""
    # The kernel ignores signals without a handler for a first process, as this one is.
    # SystemExit lets `finally` blocks end the workers before.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    os.setsid()  # Ctrl-C arrives once, as the launcher's signal, not twice.
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    die_with_parent(launcher.is_alive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        nodes = _build(cluster, groups)
    except (OSError, NetlinkError) as error:
        raise SystemExit(
            f"error: cannot build the emulated cluster: {error}"
        ) from error
    # Else a fork prints the traceback of any error.
    with command():
        code = job(nodes)
    raise SystemExit(code)


def _build(cluster: EmulatedCluster, groups: Sequence[Path]) -> Nodes:
    """Builds the network around this process, which becomes the switch.

    A bridge is the switch, and a pair of virtual interfaces connects a node to it. Both
    ends are limited, so each direction of a link has the rate.
    """
    _call(_LIBC.unshare, _CLONE_NEWNET | _CLONE_NEWNS)
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    _name_nodes(cluster)
    _mount("proc", "/proc", "proc")
    rate = parse_rate(cluster.rate)
    switch_net = _keep("net")
    with IPRoute() as ip:
        ip.link("set", index=_index(ip, "lo"), state="up")
        ip.link("add", ifname="switch", kind="bridge")
        ip.link("set", index=_index(ip, "switch"), state="up")
    entries = []
    for node in range(cluster.nodes):
        _call(_LIBC.unshare, _CLONE_NEWNET | _CLONE_NEWUTS)
        socket.sethostname(f"node{node}")
        CONGESTION_CONTROL.write_text("reno")
        peer = {"ifname": f"node{node}", "net_ns_fd": switch_net}
        with IPRoute() as ip:
            ip.link("set", index=_index(ip, "lo"), state="up")
            ip.link("add", ifname=INTERFACE, kind="veth", peer=peer)
            index = _index(ip, INTERFACE)
            ip.addr("add", index=index, address=_address(node), prefixlen=24)
            _limit(ip, index, rate)
            ip.link("set", index=index, state="up")
        entries.append((_keep("net"), _keep("uts")))
        _call(_LIBC.setns, switch_net, _CLONE_NEWNET)
        with IPRoute() as ip:
            index = _index(ip, f"node{node}")
            _limit(ip, index, rate)
            ip.link("set", index=index, master=_index(ip, "switch"), state="up")
    return Nodes(cluster, entries, groups)


def _name_nodes(cluster: EmulatedCluster) -> None:
    """Gives the cluster its own /etc/hosts, a file in memory."""
    # /proc serves as a place for the file: the caller mounts the real one over it.
    _mount("tmpfs", "/proc", "tmpfs")
    hosts = Path("/proc/hosts")
    names = [f"{_address(node)} node{node}" for node in range(cluster.nodes)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    _mount("/proc/hosts", "/etc/hosts", flags=_MS_BIND)


def _limit(ip: IPRoute, index: int, rate: float | None) -> None:
    """Limits what an interface sends to a rate in bytes per second."""
    if rate is None:
        return
    burst = max(MIN_BURST_BYTES, round(rate * BURST_SECONDS))
    queue = f"{QUEUE_SECONDS * 1000:.0f}ms"
    ip.tc("add", "tbf", index, rate=round(rate), burst=burst, latency=queue)


def _keep(kind: str) -> int:
    """Opens the current namespace, which stays alive as long as the file is open."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)


def _path_of(file: int) -> str:
    """The path of an open file for other processes."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _index(ip: IPRoute, name: str) -> int:
    (index,) = ip.link_lookup(ifname=name)
    return index


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    names = (source.encode(), target.encode(), kind.encode())
    _call(_LIBC.mount, *names, ctypes.c_ulong(flags), None)


def _call(function: Any, *arguments: Any) -> None:
    """Calls a function of the C library, and raises its error."""
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")
