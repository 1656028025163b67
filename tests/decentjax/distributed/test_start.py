"""Scripts of a user's as processes of a job: real processes, started in all ways."""

import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from decentjax import distributed
from decentjax.distributed.devices import own_gpus
from decentjax.distributed.place import JobPlace, find_place, variables_of
from decentjax.process.address import is_loopback, split_address, to_address
from tests import checkout
from tests.checkout import ROOT
from tests.ipv6 import has_ipv6, needs_ipv6
from tests.machines import needs_root
from train.launch import check_port

LONG = 200  # Longer than any wait here should be, so that a hang is a failure.
ENV = checkout.ENV | {"PYTHONPATH": str(ROOT)}
LAUNCH = ("-m", "decentjax", "launch", "-n")


def start(*command: object, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=ENV | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def by_torchrun(number: int, count: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


MASTER_IPV6 = {"MASTER_ADDR": "::1"}
MPI_IPV6 = {"OMPI_MCA_orte_hnp_uri": "8192.0;tcp6://[::1,fd00::2]:34911"}


def by_slurm(number: int, count: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "JAX_COORDINATOR_PORT": str(port),
    }


def by_open_mpi(number: int, count: int, port: int) -> dict[str, str]:
    return {
        "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(number),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
        "JAX_COORDINATOR_PORT": str(port),
    }


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=LONG)
    finally:
        process.kill()
    return process.returncode, output


# Its argument is the number of workers of a process; each prints all that it sees.
SCRIPT = """
import json, os, socket, sys
import jax, numpy as np
from decentjax import distributed, over_workers, place
from decentjax.placement import local_workers

number = int(os.environ.get("DECENTJAX_PROCESS_ID", "0"))
socket.gethostname = lambda: "AB"[number % 2]
mesh = distributed.initialize(int(sys.argv[1]), step_deadline=100, start_seconds=150)
own = local_workers(mesh)
numbers = place(np.array(own, np.float32), mesh)
total = over_workers(lambda x: jax.lax.psum(x, "workers"), mesh)
try:
    distributed.initialize()
except ValueError as error:
    again = str(error)
print("facts", json.dumps({
    "processes": [d.process_index for d in mesh.devices],
    "own": own,
    "sum": float(jax.jit(total)(numbers).addressable_data(0)[0]),
    "threads": int(os.environ["NPROC"]),
    "limit": "execution_terminate_timeout=1000s" in os.environ.get("XLA_FLAGS", ""),
    "again": again,
}), flush=True)
"""


def facts_in(output: str) -> list[dict]:
    found = re.findall(r"facts (.*)", output)
    return sorted(map(json.loads, found), key=lambda x: x["own"])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Jobs of one script, started in all ways, all at once."""
    script = tmp_path_factory.mktemp("scripts") / "script.py"
    script.write_text(SCRIPT)
    started = {"alone": [start(script, 3)], "launch": [start(*LAUNCH, 3, script, 2)]}
    for name, way in [("torchrun", by_torchrun), ("slurm", by_slurm)]:
        port = check_port(0)
        started[name] = [start(script, 1, **way(i, 2, port)) for i in (0, 1)]
    for name, way, ipv6 in [
        ("torchrun, IPv6", by_torchrun, MASTER_IPV6),
        ("mpirun, IPv6", by_open_mpi, MPI_IPV6),
    ]:
        port = check_port(0)
        given = [way(i, 2, port) | ipv6 for i in (0, 1) if has_ipv6()]
        started[name] = [start(script, 1, **env) for env in given]
    yield started
    for process in itertools.chain(*started.values()):
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize(
    ("way", "order", "own"),
    [
        ("alone", [0, 0, 0], [[0, 1, 2]]),
        # Hosts A, B, A: the workers of processes 0 and 2 stand side by side.
        ("launch", [0, 0, 2, 2, 1, 1], [[0, 1], [2, 3], [4, 5]]),
        ("torchrun", [0, 1], [[0], [1]]),
        ("slurm", [0, 1], [[0], [1]]),
        # As these have it, without brackets; jax would abort.
        ("torchrun, IPv6", [0, 1], [[0], [1]]),
        ("mpirun, IPv6", [0, 1], [[0], [1]]),
    ],
)
def test_a_script_finds_its_place(way, order, own, jobs):
    if not jobs[way]:
        pytest.skip("this machine has no IPv6")
    results = [ended(process) for process in jobs[way]]
    assert {code for code, _ in results} == {0}, results
    facts = facts_in("".join(output for _, output in results))
    assert not any("no process has called" in output for _, output in results)
    assert [one["own"] for one in facts] == own
    for one in facts:
        assert one["processes"] == order
        assert one["sum"] == sum(range(len(order)))
        assert one["threads"] >= (2 if len(one["own"]) == 1 else 8 * len(one["own"]))
        assert one["limit"] == (way != "alone")
        late = "jax has already used a device, or this is the second call: call init"
        joined = "this process has already joined its job: call initialize() once"
        assert one["again"].startswith(late if way == "alone" else joined)


FAILING = """
import itertools, os, sys, threading, time
import jax, numpy as np
from decentjax import distributed, over_workers, place

mesh = distributed.initialize(start_seconds=150)
total = jax.jit(over_workers(lambda x: jax.lax.psum(x, "workers"), mesh))
numbers = place(np.ones(1, np.float32), mesh)

def fail():
    print("failed at", time.time(), flush=True)
    raise RuntimeError("the disk is on fire")

for step in itertools.count():
    jax.block_until_ready(total(numbers))
    if step == 20 and jax.process_index() == int(sys.argv[1]):
        if sys.argv[2] == "thread":
            (alone := threading.Thread(target=sys.exit, args=(3,))).start()
            alone.join()
            threading.Thread(target=fail).start()
            continue
        fail()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("who", "where"), [(1, "main"), (0, "thread")])
def test_an_exception_in_one_ends_all_within_seconds(who, where, tmp_path):
    """Without a launcher, and with one line that names each process."""
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    port = check_port(0)
    job = [start(script, who, where, **by_torchrun(i, 2, port)) for i in (0, 1)]
    results = [ended(process) for process in job]
    after = time.time()
    code, output = results[who]
    assert code == 70
    assert "RuntimeError: the disk is on fire\nerror: process" in output
    assert output.endswith(f"error: process {who}: RuntimeError: the disk is on fire\n")
    # Two seconds on a quiet machine; process 0 waits one for the others' errors.
    assert after - float(re.findall(r"failed at (\S+)", output)[0]) < 10
    code, output = results[1 - who]
    assert code == 70
    assert re.search(rf"^error: process {1 - who}: lost a peer: ", output, re.M)
    assert "Traceback" not in output


@pytest.mark.slow
def test_processes_that_differ_or_do_not_come_get_a_sentence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom decentjax import distributed\n"
        "distributed.initialize(int(sys.argv[1]), start_seconds=int(sys.argv[2]))"
    )
    port, other = check_port(0), check_port(0)
    differing = [start(script, i + 1, 150, **by_torchrun(i, 2, port)) for i in (0, 1)]
    alone = start(script, 1, 3, **by_torchrun(0, 3, other))
    for process in differing:
        code, output = ended(process)
        assert code == 70
        assert "process 0 has 1 workers, but process 1 has 2: call init" in output
    code, output = ended(alone)
    assert code == 70
    assert "within 3 s, missing 1, 2 of 3: were all of them started" in output


@pytest.mark.slow
def test_a_second_job_at_the_address_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom decentjax import distributed\n"
        "distributed.initialize(start_seconds=150)\n"
        "print('joined', flush=True)\ntime.sleep(300)"
    )
    port = check_port(0)
    with contextlib.ExitStack() as stack:
        first = [start(script, **by_torchrun(i, 2, port)) for i in (0, 1)]
        for process in first:
            stack.enter_context(process)
            stack.callback(process.kill)
        assert first[0].stdout is not None
        assert any(line == "joined\n" for line in first[0].stdout)
        code, output = ended(start(script, **by_torchrun(0, 2, port)))
        assert code == 70
        assert "error: process 0: ValueError: process 0 cannot listen at" in output
        assert [process.poll() for process in first] == [None, None]


@pytest.mark.parametrize("call", [distributed.initialize, distributed.initialize_peer])
def test_a_call_after_a_device_was_used_is_refused(call):
    jax.devices()
    with pytest.raises(ValueError, match=r"jax has already used a device, or this"):
        call()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"local_workers": 0}, "local_workers must be an integer of at least 1, got 0"),
        ({"local_workers": True}, "local_workers must be an integer of .*, got True"),
        ({"step_deadline": 0.5}, "step_deadline must be a Python number .*, got 0.5"),
        ({"start_seconds": 2}, "start_seconds must be an integer of at least 3, got 2"),
    ],
)
def test_an_impossible_argument_gets_a_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        distributed.initialize(**arguments)


OURS = variables_of(JobPlace("127.0.0.1:5", 4, 2, 1))
ELASTIC = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True"}
MPI_5 = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, ("", 1, 0, 0)),
        (OURS, ("127.0.0.1:5", 4, 2, 1)),
        (by_torchrun(1, 3, 99), ("127.0.0.1:99", 3, 1, 1)),
        # Where torchrun itself listens, the next port.
        (by_torchrun(1, 3, 99) | ELASTIC, ("127.0.0.1:100", 3, 1, 1)),
        (by_torchrun(1, 3, 99) | MASTER_IPV6, ("[::1]:99", 3, 1, 1)),
        (by_torchrun(1, 3, 99) | {"MASTER_ADDR": "[::1]"}, ("[::1]:99", 3, 1, 1)),
        (by_slurm(1, 3, 99), ("localhost:99", 3, 1, 1)),
        (by_open_mpi(1, 3, 99), ("127.0.0.1:99", 3, 1, 1)),
        (MPI_5 | {"MASTER_ADDR": "a", "MASTER_PORT": "9"}, ("a:9", 3, 2, None)),
        # The innermost launcher.
        (by_slurm(1, 2, 99) | OURS, ("127.0.0.1:5", 4, 2, 1)),
        (by_slurm(1, 2, 9) | by_torchrun(5, 8, 7) | ELASTIC, ("127.0.0.1:8", 8, 5, 5)),
        # At the other address PyTorch may listen, as it does in an emulated cluster.
        (by_slurm(1, 3, 9) | by_torchrun(1, 3, 99), ("localhost:9", 3, 1, 1)),
    ],
)
def test_each_launcher_says_a_place(env, place, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert find_place(1) == place


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:5", "127.0.0.1", 5),
        ("node7:65535", "node7", 65535),
        ("[::1]:5", "::1", 5),
        ("::1:5", "::1", 5),
        ("0:0:0:0:0:0:0:1:5", "::1", 5),
        ("[fe80::1%eth0]:5", "fe80::1%eth0", 5),
    ],
)
def test_an_address_has_a_host_and_a_port(address, host, port):
    assert split_address(address) == (host, port)
    assert split_address(to_address(host, port)) == (host, port)
    with pytest.raises(ValueError, match=r"an address is HOST:PORT, .* from 1 to"):
        split_address(to_address(host, 0))


NO_ADDRESSES = ["", "5", ":5", "a", "a:", "a:b", "a:65536", "a:-5", "::1", "[::1]"]
NO_ADDRESSES += [
    "a:b:5",
    "a b:5",
    "a..b:5",
    64 * "a" + ":5",
    "fe80::1%a b:5",
    "a:000005",
]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_gets_a_sentence(address):
    with pytest.raises(ValueError, match=f"HOST:PORT.* got '{re.escape(address)}'"):
        split_address(address)


@pytest.mark.parametrize(
    ("bind", "where"),
    [
        ("node7", ("node7", 0)),
        ("node7:0", ("node7", 0)),
        ("127.0.0.1:5", ("127.0.0.1", 5)),
        ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[::1]:5", ("::1", 5)),
        ("fe80::1:5", ("fe80::1:5", 0)),
    ],
)
def test_where_a_port_may_be_missing_a_whole_ipv6_address_is_a_host(bind, where):
    assert split_address(bind, port=0) == where


def test_loopback_is_known_in_each_form():
    assert all(map(is_loopback, ["127.0.0.1", "127.1", "localhost", "::1", "0::1"]))
    assert not any(map(is_loopback, ["10.0.0.1", "fe80::1%eth0", "::", "node7", ""]))


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"RANK": "1"}, "set WORLD_SIZE and MASTER_ADDR and MASTER_PORT too, or unset"),
        (MPI_5, "OMPI_COMM_WORLD_RANK says that .* set MASTER_ADDR and MASTER_PORT"),
        (OURS | {"DECENTJAX_COORDINATOR": ""}, "set DECENTJAX_COORDINATOR too"),
        (by_torchrun(2, 2, 9), "RANK must be from 0 to 1, as WORLD_SIZE is 2; got 2"),
        (by_torchrun(0, 0, 9), "WORLD_SIZE must be a whole number of at least 1, got"),
        (by_torchrun(0, 1, 9) | {"RANK": "-1"}, "RANK must be a whole number .* '-1'"),
        (
            by_slurm(1, 4, 9) | by_torchrun(0, 4, 9),
            "RANK and WORLD_SIZE say process 0 of 4, but Slurm or Open MPI say process "
            "1 of 4: unset the former, or make them agree",
        ),
        (by_slurm(1, 4, 9) | {"SLURM_NTASKS": "x"}, "cannot find the other processes"),
    ],
)
def test_variables_that_cannot_be_get_a_sentence(env, sentence, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        find_place(1)


@pytest.mark.parametrize(
    ("local_id", "count", "given", "wanted"),
    [
        (None, 2, None, None),
        (0, 1, None, [0]),
        (3, 2, None, [6, 7]),
        (3, 2, "1,5", [1, 5]),
    ],
)
def test_each_process_has_gpus_of_its_own(local_id, count, given, wanted, monkeypatch):
    if given:
        monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", given)
    assert own_gpus(local_id, count) == wanted


# Two workers average many arrays in one program, of the script's own in a job that the
# library starts, else of the library's: a second program like it could come from the
# cache that the first has filled.
MEANS = """
import os, sys
import jax, numpy as np
from jax.sharding import PartitionSpec
from decentjax import distributed, mix, over_workers, place
from decentjax.mixing import Lowering
from decentjax.placement import local_workers
from decentjax import topology, worker_mesh

if sys.argv[1] == "library":
    mesh = distributed.initialize()
else:
    address, count, number = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", 2 // count)
    if sys.argv[1] == "script":
        jax.distributed.initialize(address, count, number)
    mesh = worker_mesh(2)
block = [(128,), (128, 384), (384,), (128, 128), (128,), (128, 512), (512,), (512, 128)]
draws = np.random.default_rng(0)
both = [draws.standard_normal((2, *x)).astype(np.float32) for x in 4 * block]
own = local_workers(mesh)
arrays = place([x[own] for x in both], mesh)

def average(arrays):
    exchange = topology.one_peer_ring(2)[0]
    return mix(arrays, exchange, "workers", lowering=Lowering(piece_bytes=2**16))

def compiled():
    if sys.argv[1] != "library":
        return jax.jit(over_workers(average, mesh))
    spec = PartitionSpec("workers")
    of_rows = lambda x: [a[None] for a in average([a[0] for a in x])]
    return jax.jit(jax.shard_map(of_rows, mesh=mesh, in_specs=spec, out_specs=spec))

for means in 10 * [compiled()] + 10 * [compiled()]:
    for x, got in zip(both, jax.block_until_ready(means(arrays)), strict=True):
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data[0], x.mean(0), atol=1e-6)
print("averaged", flush=True)
"""


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize(
    ("who", "count"), [("library", 2), ("script", 2), ("script", 1), ("alone", 1)]
)
def test_no_exchange_between_cpus_is_loaded_from_the_cache(who, count, tmp_path):
    """XLA would run its messages in any order."""
    script = tmp_path / "script.py"
    script.write_text(MEANS)
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "NPROC": "16",  # A collective between devices of one process holds a thread.
    }
    for _ in range(2):
        port = check_port(0)
        address = f"127.0.0.1:{port}"
        job = [
            start(script, who, address, count, i, **env, **by_torchrun(i, count, port))
            for i in range(count)
        ]
        results = [ended(process) for process in job]
        assert [code for code, _ in results] == [0] * count, results
        assert all("averaged" in output for _, output in results)


def scripts_of(page: str) -> list[str]:
    """The Python blocks of a page that are a job's processes."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block for block in blocks if "distributed.initialize" in block]


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("number", [0, 1])
def test_the_scripts_of_the_guide_train_as_a_job(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(scripts_of("docs/guides/own-project.md")[number])
    with subprocess.Popen(
        [sys.executable, *LAUNCH, "4", script.name],
        cwd=tmp_path,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        code, output = ended(job)
    assert code == 0, output
    rows = re.findall(r"worker (\d) of 4: \[([^\]]*)\]", output)
    assert sorted(worker for worker, _ in rows) == ["0", "1", "2", "3"]
    for _, row in rows:
        params = list(map(float, row.split()))
        assert params == pytest.approx([1.0, -2.0, 3.0], abs=0.1)


# Two machines, m0 with the processes 0 and 1, on a network of their own.
NETWORK = """
mount --make-rprivate /
mount -t tmpfs tmpfs /run
set -e
for i in 0 1; do ip netns add m$i; done
ip link add eth0 netns m0 type veth peer name eth0 netns m1
for i in 0 1; do
  ip -n m$i link set lo up
  ip -n m$i addr add 10.99.0.1$i/24 dev eth0
  ip -n m$i addr add fd99::1$i/64 dev eth0 nodad 2> "$0/ipv6" || true
  ip -n m$i link set eth0 up
  printf "127.0.0.1 localhost\\n127.0.1.1 machine$i\\n" > "$0/hosts$i"
done
echo 10.99.0.10 machine0 >> "$0/hosts1"
for number in 0 1 2; do
  i=$((number / 2))
  DECENTJAX_PROCESS_ID=$number ip netns exec m$i unshare --uts --mount sh -c "
    hostname machine$i; mount --bind $0/hosts$i /etc/hosts; exec $1 $0/script.py
  " &
done
set +e
wait
"""
ACROSS = """
import sys
import jax, numpy as np
from decentjax import distributed, over_workers, place
from decentjax.placement import local_workers

mesh = distributed.initialize(start_seconds=int(sys.argv[1]))
own = place(np.float32(local_workers(mesh)), mesh)
mean = over_workers(lambda x: jax.lax.pmean(x, "workers"), mesh)
found = float(jax.jit(mean)(own).addressable_data(0)[0])
print(f"mean {found}\\n", end="", flush=True)  # Whole, beside those of others.
"""


def two_machines(folder: Path, coordinator: str, seconds: int, **env: str) -> str:
    (folder / "script.py").write_text(ACROSS.replace("sys.argv[1]", str(seconds)))
    place = {"COORDINATOR": coordinator, "NUM_PROCESSES": "3"}
    done = subprocess.run(
        ["unshare", "-n", "-m", "sh", "-c", NETWORK, str(folder), sys.executable],
        env=ENV | {f"DECENTJAX_{k}": text for k, text in place.items()} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG,
        check=False,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.draw(2)
@needs_root
@pytest.mark.parametrize(
    ("coordinator", "bind"),
    [
        ("10.99.0.10", None),
        ("10.99.0.10", "0.0.0.0"),
        pytest.param("[fd99::10]", None, marks=needs_ipv6),
        pytest.param("10.99.0.10", "[::]", marks=needs_ipv6),
    ],
)
def test_machines_whose_names_are_loopback_exchange(coordinator, bind, tmp_path):
    """As Debian has them in /etc/hosts."""
    own = {"JAX_COORDINATOR_BIND_ADDRESS": f"{bind}:5000"} if bind else {}
    output = two_machines(tmp_path, f"{coordinator}:5000", LONG - 50, **own)
    assert output.count("mean 1.0") == 3, output


@pytest.mark.nightly
@needs_root
def test_a_coordinator_whose_name_is_loopback_says_so(tmp_path):
    output = two_machines(tmp_path, "machine0:5000", 30)
    said = "missing 2 of 3: .*; 127.0.1.1 is reachable only from this machine .*hosts"
    assert re.search(said, output), output
    assert "mean" not in output
