"""The emulated cluster: real namespaces, real links, real deaths."""

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from tests import tiny
from tests.checkout import ROOT
from tests.jobs import processes_with, python, started, wait_until
from tests.machines import needs_root
from tests.run_folders import column
from train.emulate import main
from train.job.cores import _root
from train.job.namespaces import EmulatedCluster, environment, parse_rate
from train.run.loop import train

EMULATE = [sys.executable, "-m", "train.emulate"]
# Programs of a few steps: their compilation is most of a job's time.
ENV = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


DESCRIBE = """
import json, os, socket, sys

control = socket.socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
print(json.dumps({
    "host": socket.gethostname(),
    "addresses": [socket.gethostbyname(name) for name in sys.argv[1:]],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "nodelist": os.environ["SLURM_STEP_NODELIST"],
    "rank": os.environ["RANK"],
    "control": control.rstrip(b"\\0").decode(),
}))
"""
# For each [sender, receiver] of the ranks, the receiver prints the times at which it
# begins and ends to receive; all begin when the receiver has all its connections.
TRANSFER = """
import json, os, socket, sys, threading, time

transfers, num_bytes = json.loads(sys.argv[1]), int(sys.argv[2])
rank, per_node = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])

def receive(connection):
    begin, left = time.monotonic(), num_bytes
    connection.sendall(b"go")
    while left:
        left -= len(connection.recv(1 << 16))
    sys.stdout.write(f"{begin} {time.monotonic()}\\n")  # whole, beside other threads
    connection.close()

def send(receiver):
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((f"node{receiver // per_node}", 5000))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    connection.recv(2)
    connection.sendall(bytes(num_bytes))
    connection.recv(1)

sources = [sender for sender, receiver in transfers if receiver == rank]
work = [(send, receiver) for sender, receiver in transfers if sender == rank]
if sources:
    server = socket.create_server(("", 5000))
    work += [(receive, server.accept()[0]) for _ in sources]
threads = [threading.Thread(target=do, args=[what]) for do, what in work]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
LINGER = """
import os, signal, sys, time

def save(signum, frame):
    time.sleep(0.3)
    print("saved")
    sys.exit()

signal.signal(signal.SIGTERM, save)
os.system("sleep 300 &")
print(os.stat("/proc/self/ns/net").st_ino)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
    if os.path.exists(sys.argv[1] + ".say"): print("is there anyone?")
if os.environ["RANK"] == "1": sys.exit(3)
"""


def emulate(options: str, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*EMULATE, *options.split(), "--", *command],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=100,
    )


def seconds(options: str, transfers: list[tuple[int, int]], num_bytes: int) -> float:
    """Returns how long the transfers from rank to rank take, all at the same time."""
    code = [sys.executable, "-c", TRANSFER, json.dumps(transfers), str(num_bytes)]
    job = emulate(options, *code)
    assert job.returncode == 0, job.stdout + job.stderr
    times = [line.split()[1:] for line in job.stdout.splitlines()]
    assert len(times) == len(transfers)
    return max(float(end) for _, end in times) - min(float(begin) for begin, _ in times)


def is_held(namespace: int) -> bool:
    """Returns whether a process, an open file or a mount holds a network namespace."""
    name = f"net:[{namespace}]"
    for pattern in ("[0-9]*/ns/net", "[0-9]*/fd/*"):
        for path in Path("/proc").glob(pattern):
            try:
                if os.readlink(path) == name:
                    return True
            except OSError:
                continue
    return name in Path("/proc/self/mountinfo").read_text()


@needs_root
def test_a_worker_sees_its_node():
    names = ("localhost", "node0", "node1", "node2")
    code = [sys.executable, "-c", DESCRIBE, *names]
    job = emulate("--nodes 3 --rate 1gbit --distribution cyclic", *code)
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        rank = line[1]
        assert json.loads(line[4:]) == {
            "host": f"node{rank}",
            "addresses": ["127.0.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.3"],
            "interfaces": ["lo", "eth0"],
            "nodelist": "node[0-2]",
            "rank": rank,
            "control": "reno",
        }


@needs_root
@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [
        ("block", ["node0", "node0", "node1", "node1"]),
        ("cyclic", 2 * ["node0", "node1"]),
    ],
)
def test_workers_are_dealt_out_as_srun_does(distribution, hosts):
    options = f"--nodes 2 --workers-per-node 2 --distribution {distribution}"
    job = emulate(options, "hostname")
    assert job.returncode == 0
    assert sorted(job.stdout.splitlines()) == [f"[{i}] {hosts[i]}" for i in range(4)]


def test_the_environment_is_that_of_srun_and_torchrun():
    cluster = EmulatedCluster(nodes=4, workers_per_node=2, threads_per_worker=3)
    assert environment(cluster, 5) == {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "node[0-3]",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "8",
        "RANK": "5",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NPROC": "4",
        "OMP_NUM_THREADS": "3",
    }
    cluster = EmulatedCluster(nodes=4, workers_per_node=2, distribution="cyclic")
    env = environment(cluster, 6)
    assert (env["SLURM_NODEID"], env["SLURM_LOCALID"], env["LOCAL_RANK"]) == (*"211",)
    assert environment(EmulatedCluster(nodes=1), 0)["SLURM_STEP_NODELIST"] == "node0"


@pytest.mark.parametrize(
    ("distribution", "nodes"), [("block", "00001111"), ("cyclic", "00110011")]
)
def test_the_processes_of_a_worker_are_on_its_node(distribution, nodes):
    cluster = EmulatedCluster(
        nodes=2,
        workers_per_node=2,
        processes_per_worker=2,
        threads_per_worker=4,
        distribution=distribution,
    )
    found = [environment(cluster, rank) for rank in range(8)]
    assert "".join(env["SLURM_NODEID"] for env in found) == nodes
    for node in "01":
        own = [env["SLURM_LOCALID"] for env in found if env["SLURM_NODEID"] == node]
        assert own == ["0", "1", "2", "3"]
    for env in found:
        assert (env["SLURM_NTASKS"], env["LOCAL_WORLD_SIZE"]) == ("8", "4")
        assert env["OMP_NUM_THREADS"] == "2"


@needs_root
@pytest.mark.parametrize("nodes", [1, 2])
def test_jax_finds_the_cluster_as_under_slurm(nodes):
    code = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize()
print(jax.process_index(), jax.process_count())
"""
    job = emulate(f"--nodes {nodes}", sys.executable, "-c", code)
    assert job.returncode == 0, job.stdout
    for i in range(nodes):
        assert f"[{i}] {i} {nodes}" in job.stdout.splitlines()


# What may leave at once, at both ends of a link, is not limited: 2 * 32 KiB.
@needs_root
def test_a_link_has_its_rate_and_a_node_inside_is_faster():
    options = "--nodes 2 --workers-per-node 2 --rate 20mbit"
    between = seconds(options, [(2, 0)], 2_000_000)
    inside = seconds(options, [(1, 0)], 2_000_000)
    assert between > (2_000_000 - 2 * 2**15) * 8 / 20e6
    assert between > 5 * inside
    assert between > 5 * seconds("--nodes 2 --rate none", [(1, 0)], 2_000_000)


BUSY = """
import time

began = time.perf_counter()
while (seconds := time.perf_counter() - began) < 1:
    pass
print(time.process_time() / seconds)
"""


@needs_root
def test_a_worker_has_its_share_of_a_core_and_no_more():
    """An upper limit: another program may take what it does not use."""
    left = _root()[0] / "decentjax-left"  # Of a process that was killed.
    left.mkdir()
    os.utime(left, (0, 0))
    job = emulate("--nodes 2 --cores 0.2", sys.executable, "-c", BUSY)
    assert job.returncode == 0, job.stdout
    shares = [float(line.split()[1]) for line in job.stdout.splitlines()]
    assert len(shares) == 2
    assert max(shares) < 0.3
    assert not left.exists()


@needs_root
@pytest.mark.parametrize("transfers", [[(0, 1), (0, 2)], [(1, 0), (2, 0)]])
def test_both_directions_of_a_link_have_its_rate(transfers):
    took = seconds("--nodes 3 --rate 20mbit", transfers, 1_000_000)
    assert took > (2 * 1_000_000 - 4 * 2**15) * 8 / 20e6


@pytest.mark.slow
@pytest.mark.draw(2)
@needs_root
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("nothing", 0),
        ("failure", 3),
        ("Ctrl-C", 0),
        ("SIGTERM", 0),
        ("SIGHUP", 0),
        ("closed output", 128 + signal.SIGPIPE),
        ("SIGKILL", -signal.SIGKILL),
        ("SIGKILL of the switch", 128 + signal.SIGKILL),
    ],
)
def test_no_process_or_namespace_is_left(end, code, tmp_path):
    before = (socket.if_nameindex(), Path("/proc/self/mounts").read_text())
    hosts = Path("/etc/hosts").read_text()
    marker = uuid.uuid4().hex
    nodes = 2 if end == "failure" else 1
    options = f"--nodes {nodes} --rate 20mbit"
    go = tmp_path / "go"
    with subprocess.Popen(
        [*EMULATE, *options.split(), "--", sys.executable, "-c", LINGER, str(go)],
        cwd=ROOT,
        env={**os.environ, "MARKER": marker},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            assert job.stdout is not None
            lines = [job.stdout.readline() for _ in range(nodes)]
            namespaces = [int(line.split()[-1]) for line in lines]
            assert all(map(is_held, namespaces))
            wait_until(lambda: len(processes_with(marker)) >= 2 + 2 * nodes)
            switch = [pid for pid in processes_with(marker) if parent(pid) == job.pid]
            if end == "SIGKILL of the switch":
                os.kill(switch[0], signal.SIGKILL)
            elif end == "Ctrl-C":  # A terminal sends it to the whole group.
                os.killpg(job.pid, signal.SIGINT)
            elif end == "closed output":
                job.stdout.close()
                job.stdout = None
                Path(f"{go}.say").touch()
            elif end.startswith("SIG"):
                job.send_signal(signal.Signals[end])
            else:
                go.touch()
            out, _ = job.communicate(timeout=100)
        finally:
            job.kill()
    assert job.returncode == code, out
    stopped = end in ("Ctrl-C", "SIGTERM", "SIGHUP")
    assert ("[0] saved" in (out or "")) == stopped
    wait_until(lambda: not processes_with(marker))
    wait_until(lambda: not any(map(is_held, namespaces)))
    assert (socket.if_nameindex(), Path("/proc/self/mounts").read_text()) == before
    assert Path("/etc/hosts").read_text() == hosts


def parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


ORDER = """
from pathlib import Path

from train.cli.load import load_config
from train.config import DistributedConfig
from train.job.distributed import job_mesh, meet, start

config = load_config(Path("tests/tiny.py"))
start(DistributedConfig(enabled=True), config.workers)
hosts = meet(config)
devices = job_mesh(config.workers, hosts).devices.ravel()
print("mesh", [(hosts[d.process_index], d.process_index) for d in devices])
"""


@pytest.mark.slow
@pytest.mark.draw(2)
@needs_root
@pytest.mark.parametrize(
    ("distribution", "processes"), [("block", [0, 1, 2, 3]), ("cyclic", [0, 2, 1, 3])]
)
def test_the_workers_of_a_node_stand_side_by_side(distribution, processes):
    options = f"--nodes 2 --workers-per-node 2 --distribution {distribution}"
    job = emulate(options, sys.executable, "-c", ORDER)
    assert job.returncode == 0, job.stdout + job.stderr
    hosts = ["node0", "node0", "node1", "node1"]
    wanted = f"mesh {list(zip(hosts, processes, strict=True))}"
    lines = [line for line in job.stdout.splitlines() if "mesh" in line]
    assert [line[4:] for line in lines] == 4 * [wanted]


@pytest.mark.slow
@needs_root
def test_workers_that_do_not_fit_a_node_get_a_sentence(tmp_path):
    command = (sys.executable, "-m", "train", "tests/tiny.py", "--distributed.enabled")
    options = ("--run-dir", str(tmp_path), "--workers.workers-per-node", "4")
    job = emulate("--nodes 2 --workers-per-node 2", *command, *options)
    assert job.returncode == 1
    assert "workers_per_node = 4 does not fit node node0, which has 2 w" in job.stdout


@pytest.mark.nightly
@needs_root
def test_training_on_a_cluster_is_training_on_one_machine(tmp_path):
    job = emulate(
        "--nodes 2 --workers-per-node 2 --distribution cyclic",
        *(sys.executable, "-m", "train", "tests/tiny.py"),
        *("--distributed.enabled", "--run-dir", str(tmp_path / "cluster")),
    )
    assert job.returncode == 0, job.stdout + job.stderr
    train(tiny.config, tmp_path / "simulated")
    got, wanted = (column(tmp_path / name) for name in ("cluster", "simulated"))
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


LOST = """
import os, sys, time
from pathlib import Path

own, others = os.environ["RANK"], Path(sys.argv[1])
(others / own).open("a").write(".")
print("starts", flush=True)
if own == "1" and (others / own).read_text() == ".":
    os.kill(os.getpid(), 9)
while not (others / "1").exists() or (others / "1").read_text() != "..":
    time.sleep(0.1)
"""


@needs_root
def test_a_lost_peer_is_started_again_alone_on_its_node(tmp_path):
    command = sys.executable, "-c", LOST, str(tmp_path)
    done = emulate("--nodes 3 --elastic", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    starts = [line for line in done.stdout.splitlines() if "starts" in line]
    assert sorted(starts) == [f"[{i}] starts" for i in (0, 1, 1, 2)]
    assert "process 1 ended, killed by SIGKILL; started again" in done.stderr


MEET = """
import os, socket, sys, time
from pathlib import Path

own, folder = int(os.environ["RANK"]), Path(sys.argv[1])
host, port = os.environ["DECENTJAX_WORKER_COORDINATOR"].split(":")
with (folder / str(own)).open("a") as file: file.write(f"{port} ")
starts = len((folder / str(own)).read_text().split())
if own % 2:
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
else:
    socket.create_server((host, int(port))).accept()
# In one piece, as the process may be killed at any time.
print(f"met on {socket.gethostname()}", flush=True)
if own == 3 and starts == 1: os.kill(os.getpid(), 9)
while len((folder / "3").read_text().split()) < 2: time.sleep(0.05)
"""


@needs_root
def test_a_worker_of_two_processes_returns_on_its_node(tmp_path):
    """Each worker meets on its own node, at a new port in each life."""
    (tmp_path / "3").touch()
    command = sys.executable, "-c", MEET, str(tmp_path)
    done = emulate("--nodes 2 --processes-per-worker 2 --elastic", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    met = sorted(line for line in done.stdout.splitlines() if "met" in line)
    assert [*dict.fromkeys(met)] == [f"[{i}] met on node{i // 2}" for i in range(4)]
    ports = [(tmp_path / str(number)).read_text().split() for number in range(4)]
    assert ports[0] == ports[1]
    assert ports[2] == ports[3]
    assert [len(x) for x in ports] == [1, 1, 2, 2]
    assert len({*ports[0], *ports[2]}) == 3
    ended = "worker 1 (processes 2, 3) ended, process 3 first, killed by SIGKILL"
    assert f"{ended}; started again" in done.stderr


@needs_root
def test_clusters_follow_one_another_and_pipes_work():
    code = """
import os, subprocess
from train.job.namespaces import EmulatedCluster, in_cluster

def job(nodes):
    process = nodes.worker(1, ["sh", "-c", "read line; echo $(hostname) $line $RANK"])
    env = {**os.environ, **process.env}
    print(subprocess.check_output(process.argv, input=b"hears", env=env))
    return 7

for rate in ("none", "200mbit"):
    assert in_cluster(EmulatedCluster(nodes=2, rate=rate), job) == 7
    assert os.stat("/proc/self/ns/pid").st_ino == os.stat(
        "/proc/self/ns/pid_for_children").st_ino
"""
    job = python("-W", "error", "-c", code)
    assert job.stdout.splitlines() == 2 * ["b'node1 hears 1\\n'"]


@needs_root
def test_a_job_without_handlers_unwinds_at_sigterm():
    code = """
import sys, time
from train.job.namespaces import EmulatedCluster, in_cluster

def job(worker):
    try:
        print("ready", flush=True)
        while True:  # A signal just before a sleep is handled after it.
            time.sleep(0.1)
    finally:
        print("unwound", flush=True)

sys.exit(in_cluster(EmulatedCluster(nodes=1), job))
"""
    with started(sys.executable, "-c", code) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        assert job.communicate(timeout=60)[0] == "unwound\n"
    assert job.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("200mbit", 200e6), ("1gbit", 1e9), ("1.5gbit", 1.5e9), ("64kbit", 64e3)],
)
def test_a_rate_is_read_in_its_unit(rate, bits):
    assert parse_rate(rate) == bits / 8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "usage: decentjax emulate --nodes N"),
        ("--nodes 2", "usage: decentjax emulate --nodes N"),
        ("--nodes 2 --", "usage: decentjax emulate --nodes N"),
        ("--nodes 0 -- true", "nodes must be between 1 and 254, got 0"),
        ("--nodes 255 -- true", "nodes must be between 1 and 254, got 255"),
        (
            "--nodes 2 --workers-per-node 0 -- true",
            "--workers-per-node must be at",
        ),
        (
            "--nodes 2 --processes-per-worker 0 -- true",
            "--processes-per-worker must be at",
        ),
        ("--nodes 2 --threads-per-worker 0 -- true", "--threads-per-worker must be at"),
        ("--nodes 2 --cores 0 -- true", "cores must be from 0.01 to 64, got 0.0"),
        ("--nodes 2 --rate 200 -- true", "rate must be like 200mbit"),
        ("--nodes 2 --rate 200MB -- true", "rate must be like 200mbit"),
        ("--nodes 2 --rate 0mbit -- true", "rate must be like 200mbit"),
        ("--nodes 2 --rate 100gbit -- true", "rate must be like 200mbit"),
        ("--nodes 2 --distribution plane -- true", "plane"),
        ("-- true", "--nodes"),
    ],
)
def test_bad_input_gets_a_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert sentence in f"{capsys.readouterr().err}{ended.value.code}"


@needs_root
def test_a_program_that_is_not_there_ends_the_job():
    job = emulate("--nodes 1", "/no/such/program")
    assert job.returncode == 127
    assert "/no/such/program" in job.stdout


@needs_root
def test_without_the_right_to_make_namespaces_it_says_so():
    job = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", *EMULATE, "--nodes=2", "--", "true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 1
    assert job.stderr.startswith("error: an emulated cluster needs root, for its name")
    assert "Traceback" not in job.stderr
