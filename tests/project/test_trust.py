"""What strangers, and folders of strangers, cannot do: see SECURITY.md."""

import contextlib
import copy
import functools
import itertools
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import tiny
from tests.checkout import ENV, ROOT
from tests.jobs import TRAIN, ended, of_run, started, wait_until
from tests.line import as_process
from tests.machines import needs_root
from tests.run_folders import last_step, process_id
from tests.timed import untimed
from train.__main__ import main
from train.cli.command import sentence
from train.cli.config_json import from_fields, to_json
from train.config import PeerExchange
from train.job import secret
from train.job.secret import put_back, read_secret, shared_secret
from train.report import write_report
from train.run.loop import train
from train.run.peer_run import digest
from train.store.log import read_metrics
from train.xla import read_options

LINE = "tests/line.py"
SLOW = ["--num-steps", "100000", "--task.step-seconds", "0.02"]
PEERS = ["--exchange", "peers", "--topology.name", "ring"]
OUTSIDE = "10.9.9.1"  # An address that is not loopback, in a namespace of the tests.
NAMESPACE = f"""
set -e
ip link set lo up
ip addr add {OUTSIDE}/32 dev lo
printf '127.0.0.1 localhost\\n{OUTSIDE} outside\\n' > "$0/hosts"
mount --bind "$0/hosts" /etc/hosts
hostname outside
exec "$@"
"""


def in_namespace(folder: Path, *command: str, **env: str):
    """A process on a machine whose name has an address that others would reach."""
    own = ("unshare", "--net", "--mount", "--uts", "sh", "-c", NAMESPACE, str(folder))
    return started(*own, *command, **env)


def listeners(pid: int) -> set[str]:
    """The IP addresses at which a process listens."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(path))
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                words = bytes.fromhex(local.split(":")[0])
                # In words of four bytes, each in this machine's order.
                parts = [words[i : i + 4] for i in range(0, len(words), 4)]
                order = sys.byteorder
                raw = b"".join(int.from_bytes(x, order).to_bytes(4) for x in parts)
                found.add(socket.inet_ntop(family, raw))
    return found


LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}


@pytest.mark.slow
@pytest.mark.draw(2)
@needs_root
@pytest.mark.parametrize("options", [[], PEERS], ids=["job", "peers"])
def test_a_launched_job_listens_on_loopback_alone(options, tmp_path):
    """Also gloo, which would take the address of the machine's name."""
    run_dir = tmp_path / "run"
    command = [*TRAIN[:2], "train.launch", "--processes", "2", LINE, *SLOW, *options]
    with in_namespace(tmp_path, *command, "--run-dir", str(run_dir)) as job:
        wait_until(lambda: last_step(run_dir, 1) > 3 or len(read_metrics(run_dir)) > 3)
        found = of_run(run_dir)
        assert len(found) == 2
        for pid in found.values():
            assert listeners(pid)
            assert listeners(pid) <= LOOPBACK
        stats = (Path(f"/proc/{pid}/stat").read_text() for pid in found.values())
        (launcher,) = {int(text.split()[3]) for text in stats}
        assert not listeners(launcher)
        job.terminate()
        output = ended(job)
    assert "warning: " not in output


ONE = ["--distributed.num-processes", "1", "--distributed.process-id", "0"]
SLURM = {"JOB_ID": "7", "STEP_NODELIST": "outside", "NTASKS": "1"}
SLURM = {f"SLURM_{k}": v for k, v in {**SLURM, "PROCID": "0", "LOCALID": "0"}.items()}
OF_JOB = "process 0 listens at .*join or end the job, and read and change its models"


@pytest.mark.slow
@pytest.mark.draw(3)
@needs_root
@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        ([*ONE, "--distributed.coordinator", f"{OUTSIDE}:5000"], {}, OF_JOB),
        ([], SLURM, OF_JOB),
        (
            [*ONE, *PEERS, "--exchange.bind", OUTSIDE],
            {},
            f"listens at {OUTSIDE}: .*can end it, .*read and change the models",
        ),
    ],
    ids=["coordinator", "slurm", "peers"],
)
def test_who_listens_elsewhere_is_warned_in_one_line(options, env, words, tmp_path):
    """And listens there alone, and not at all addresses of the machine."""
    run_dir = tmp_path / "run"
    command = [*TRAIN, LINE, *SLOW, *options, "--distributed.enabled"]
    with in_namespace(tmp_path, *command, "--run-dir", str(run_dir), **env) as job:
        wait_until(lambda: read_metrics(run_dir) or last_step(run_dir, 0) > 3)
        assert listeners(job.pid) <= {OUTSIDE, f"::ffff:{OUTSIDE}"}
        assert listeners(job.pid)
        job.terminate()
        output = ended(job)
    (warning,) = (line for line in output.splitlines() if "warning" in line)
    assert re.match(f"warning: {words}.*see SECURITY.md", untimed(warning))


TRAP = """
import sys

def trap(event, arguments):
    if event == "pickle.find_class":
        raise SystemExit(f"unpickled {arguments}")
    if event == "exec":
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "exec_module":
                return  # An import.
            frame = frame.f_back
        raise SystemExit(f"evaluated {arguments}")

sys.addaudithook(trap)
for trapped in (
    lambda: eval("1"),
    lambda: exec("1"),
    lambda: __import__("pickle").loads(b"cos\\nsystem\\n."),
):
    try:
        trapped()
    except SystemExit:
        continue
    raise AssertionError("it is not trapped")

from pathlib import Path
from train.__main__ import main
from train.evaluate import evaluate

run = Path(sys.argv[1])
main(["--resume", str(run), "--num-steps", "8"])
evaluate(run)
print("no code was evaluated")
"""


@pytest.mark.slow  # It compiles a transformer.
def test_a_run_that_goes_on_evaluates_no_code(tmp_path):
    """Nor its report and an evaluation: nothing is unpickled, and no text is run."""
    small = ["--num-steps", "4", "--optimizer.warmup-steps", "1"]
    run_dir = str(tmp_path / "run")
    with started(*TRAIN, "tests/tiny.py", *small, "--run-dir", run_dir) as job:
        ended(job)
    with started(sys.executable, "-c", TRAP, run_dir) as job:
        assert ended(job).endswith("no code was evaluated\n")


OWN = """
import dataclasses
import os
from os import system
from pathlib import Path

Path("ran").touch()


@dataclasses.dataclass(frozen=True)
class Mine:
    def build(self):
        return None


class Plain:
    pass


def function():
    pass
"""


@pytest.mark.parametrize(
    ("place", "trust", "words"),
    [
        ("own.py:Mine", [], "own.py:Mine, which is not .* add --trust own.py$"),
        ("own.py:Mine", ["own", "x.py", "x/own.pyc"], "add --trust own.py$"),
        ("own:Mine", ["own.py"], "own:Mine, which is not .* add --trust own$"),
        ("../evil/x.py:Mine", ["own.py"], "add --trust ../evil/x.py$"),
        ("os:system", ["own.py"], "os:system, .* add --trust os$"),
        ("own.py:system", ["own.py"], "own.py does not define system, which is"),
        ("own.py:os.system", ["own.py"], "own.py does not define os.system"),
        ("own.py:Path", ["own.py"], "own.py does not define Path"),
        ("own.py:__loader__", ["own.py"], "own.py does not define __loader__"),
        ("own.py:", ["own.py"], "own.py does not define , which"),
        ("own.py:Plain", ["own.py"], "own.py:Plain, which is not a dataclass"),
        ("own.py:function", ["own.py"], "own.py:function, which is not a dataclass"),
        ("gone.py:Mine", ["gone.py"], "there is no trusted file gone.py"),
        ("gone:Mine", ["gone"], "--trust gone is not a module or file"),
    ],
)
def test_a_run_takes_what_trusted_code_defines_alone(
    place, trust, words, tmp_path, monkeypatch
):
    """And runs no other, and none at all without."""
    monkeypatch.chdir(tmp_path)
    for name in ("own.py", "../elsewhere/own.py"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("own.py").write_text(OWN)
    fields = {**json.loads(to_json(tiny.config)), "task": {"kind": place}}
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        from_fields(fields, trust)
    assert Path("ran").exists() == (place[:7] == "own.py:" and "own.py" in trust)
    moved = {**fields, "task": {"kind": "../elsewhere/own.py:Mine"}}
    made = from_fields(moved, ["own.py"]).task
    assert type(made).__module__ == "../elsewhere/own.py"


CODE = "__import__('os').system('touch pwned')"
HOSTILE = [
    *("os.system", "os:system", CODE, "\0", "../../x", "x" * 10_000),
    *(None, [], {}, [[]], True, -1, 1e400, 10**400, float("nan")),
    *(
        {"kind": "os:system"},
        {"kind": "os.system"},
        {"__class__": "os"},
        {"a": {"b": [{}]}},
        ["a", {}],
    ),
]
FIELDS = """
    task task.kind task.model task.model.context task.unknown task.__class__ name
    num_steps workers workers.num_workers topology topology.name optimizer.decay_steps
    distributed exchange exchange.addresses step step.xla_options data.skew
    topology.make optimizer.name optimizer.decay method on_step on_evaluation
    method.policy.graphs unknown __class__ exchange.merge
"""


def at(fields: dict, path: str) -> tuple[dict, str]:
    """The object with the last name of a path, and that name."""
    *folders, name = path.split(".")
    for folder in folders:
        fields = fields[folder]
    return fields, name


def test_hostile_fields_of_a_config_get_a_sentence_or_are_data():
    for path, value in itertools.product(FIELDS.split(), HOSTILE):
        fields = json.loads(to_json(tiny.config))
        inner, name = at(fields, path)
        inner[name] = copy.deepcopy(value)
        error = None
        try:
            made = from_fields(fields)
        except Exception as raised:
            error = raised
        if error is None:  # Such as a name of a file, or defaults for an empty object.
            inner, name = at(json.loads(to_json(made)), path)
            assert value == {} or inner[name] == value or path == "method"
        else:
            assert sentence(error), (path, value)
    assert not Path("pwned").exists()


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"task":' * 900 + "1" + "}" * 900, "the task must be one of"),
        ("[]", "must hold a JSON object, got list"),
        (CODE, "is not JSON"),
        ("\0\xff", "is not JSON"),
        ('{"task": {"kind": "os.system"}}', "must be one of StdlibTask.* os.system"),
        ('{"task": {"kind": ["os"]}}', "the task must be one of"),
    ],
)
def test_a_hostile_config_json_gets_a_sentence(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    command = [*TRAIN[:2], "train.evaluate", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(f"^error: .*{words}", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "option", ["xla_gpu_cuda_data_dir=/x", "xla_backend_extra_options=-load=x"]
)
def test_a_config_names_no_program_for_the_compiler_to_run(option):
    with pytest.raises(ValueError, match="names a program to run: set it in the var"):
        read_options((option,), "gpu")


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize(
    "name", ["..", "../x", "a/b", "a\0b", "", ".", "a b", "x" * 300]
)
def test_the_name_of_a_run_is_a_name_in_its_folder(name, tmp_path):
    """Over-long ones get the system's sentence."""
    code = (
        "import dataclasses, sys; from tests.line import config; "
        "from train.__main__ import run_here; from train.cli.command import command\n"
        "with command(): run_here(dataclasses.replace(config, "
        f"name={name!r}), __import__('pathlib').Path('runs') / {name!r})"
    )
    env = {**ENV, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True
    )
    words = b"File name too long" if len(name) > 255 else b"name must be letters, dig"
    assert done.returncode == 1
    assert b"error: " + words in done.stderr
    assert b"Traceback" not in done.stderr
    assert not list(tmp_path.rglob("lock"))


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "lock", "checkpoints", "tensorboard", "wandb", "a/b"]
)
@pytest.mark.parametrize("where", ["alone", "peers", "report"])
def test_a_link_out_of_a_run_is_not_written_through(name, where, tmp_path):
    outside, run_dir = tmp_path / "outside", tmp_path / "run"
    outside.write_text("mine")
    link = run_dir / name if where != "peers" else run_dir / "process-0" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    words = f"{link} is a link to {outside}, outside of the run's folder"
    begin = {
        "alone": functools.partial(train, tiny.config, run_dir),
        "peers": functools.partial(train, as_process(0, 2), run_dir),
        "report": functools.partial(write_report, [run_dir], run_dir / "report.html"),
    }
    with pytest.raises(ValueError, match=re.escape(words)):
        begin[where]()
    assert outside.read_text() == "mine"


@pytest.mark.slow
def test_a_run_may_itself_be_a_link(tmp_path):
    """To a larger disk; and links inside are its own affair."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "newest").symlink_to("metrics.jsonl")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert train(as_process(0, 2, num_steps=2), tmp_path / "run").step == 2
    assert (tmp_path / "disk" / "process-0" / "metrics.jsonl").exists()


LEAVES = """
import contextlib, dataclasses, socket
from tests.line import config

# Of a constant rate, which a longer run keeps.
optimizer = dataclasses.replace(config.optimizer, decay="steps")
config = dataclasses.replace(config, num_steps=10, optimizer=optimizer)

@contextlib.contextmanager
def leaves(config, run_dir, start):
    for name in ("wandb", "mlruns/0", "sinks/mine"):
        folder = run_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"log{start}").symlink_to("/var/log")
        (folder / f"gone{start}").symlink_to("/nowhere/at/all")
        (folder / f"again{start}").symlink_to(f"again{start}")
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder / f"socket{start}"))
        (folder / f"secret{start}").touch(mode=0o000)
    yield lambda step, values: None
    if start == 20:
        (run_dir / "link").symlink_to("/var/log")

sinks = [leaves]
"""


@pytest.mark.slow
def test_what_is_in_the_folder_of_a_sink_is_not_the_runs(tmp_path, monkeypatch, capsys):
    """A link elsewhere, left in the last step, does not fail a run that is saved."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)  # For short names of sockets.
    Path("own.py").write_text(LEAVES)
    trust = ["--trust", "own.py", "--trust", "tests.line"]
    main(["own.py", "--run-dir", "run"])
    main(["--resume", "run", *trust, "--num-steps", "20"])
    write_report([Path("run")], Path("page.html"), trust=["own.py"])
    assert capsys.readouterr().err == ""
    main(["own.py", "--run-dir", "run", "--auto-resume", "--num-steps", "30"])
    assert re.search(
        "saved, but its report could not be written: run/link is a link to /var/log, "
        ".*: remove it, .*; write it with decentjax report run",
        capsys.readouterr().err,
    )
    with pytest.raises(SystemExit, match="run/link is a link to /var/log, outside"):
        main(["--resume", "run", *trust, "--num-steps", "40"])


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in folder.rglob("*")
    }


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("options", [[], PEERS], ids=["job", "peers"])
def test_files_of_a_run_are_changed_by_their_owner_alone(options, tmp_path):
    """Even where the umask is 0; and only the owner reads the secret."""
    command = [*TRAIN[:2], "train.launch", "--processes", "2", LINE, *options]
    command = ["sh", "-c", 'umask 0; exec "$@"', "-", *command]
    run_dir = tmp_path / "run"
    with started(*command, "--run-dir", str(run_dir)) as job:
        ended(job)
    found = modes(tmp_path)
    assert len(found) > 20
    assert {name for name, mode in found.items() if mode & 0o022} == set()
    assert ("run/peers" in found) == bool(options)
    if options:
        assert found["run/peers"] == 0o700
        assert found["run/peers/secret"] == 0o600
        secret = (run_dir / "peers" / "secret").read_bytes().strip()
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        assert [x.name for x in files if secret in x.read_bytes()] == ["secret"]


@pytest.mark.slow
def test_the_first_process_draws_the_secret_and_all_have_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from train.job.secret import *; "
        "print(shared_secret(Path(sys.argv[1])).decode())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "peers")]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(started(*command)) for _ in range(6)]
        secrets = {ended(job) for job in jobs}
    assert len(secrets) == 1
    assert len(secrets.pop().strip()) == 64
    assert [path.name for path in (tmp_path / "peers").iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o640, "x" * 32, "other users can read or change .*/secret, .* mode 640"),
        (0o602, "x" * 32, "other users can read or change .*/secret, .* mode 602"),
        (0o600, "short\n", "must hold a secret of 16 to 4096 bytes, got 5"),
        (0o600, "", "must hold a secret of 16 to 4096 bytes, got 0"),
        (0o600, "x" * 5000, "must hold a secret of 16 to 4096 bytes, got 4097"),
    ],
)
def test_a_secret_is_private_and_long(mode, text, words, tmp_path):
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ValueError, match=words):
        read_secret(path)
    with pytest.raises(ValueError, match=words):
        shared_secret(tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_of_a_secret_is_private(mode, tmp_path):
    """One that was there before, in which others could replace the secret."""
    peers = tmp_path / "peers"
    peers.mkdir()
    peers.chmod(mode)
    with pytest.raises(ValueError, match=f"change .*/peers, which .* mode {mode:o}"):
        shared_secret(peers)
    peers.chmod(0o700)
    assert shared_secret(peers) == read_secret(peers / "secret")


@needs_root
@pytest.mark.parametrize("name", ["peers", "peers/secret"])
def test_a_secret_of_another_user_is_not_taken(name, tmp_path):
    shared_secret(tmp_path / "peers")
    os.chown(tmp_path / name, 65534, 65534)
    with pytest.raises(ValueError, match=f"change .*{name}, which user 65534 owns"):
        shared_secret(tmp_path / "peers")


def test_given_addresses_need_a_given_secret(tmp_path):
    exchange = PeerExchange(addresses=("127.0.0.1:1", "127.0.0.1:2"))
    with pytest.raises(ValueError, match=r"same file with --exchange.secret-file PATH"):
        train(as_process(0, 2, exchange=exchange), tmp_path)
    own = PeerExchange(secret_file="any")
    assert digest(as_process(0, 2, exchange=own)) == digest(as_process(1, 2))


def test_a_secret_that_was_removed_is_not_drawn_again(tmp_path, monkeypatch):
    """Those that train put it back; no other would be that of the run."""
    monkeypatch.setattr(secret, "BACK_SECONDS", 0.3)
    peers = tmp_path / "peers"
    first = shared_secret(peers)
    assert not put_back(peers, first)
    shutil.rmtree(peers)
    with pytest.raises(ValueError, match="secret is missing: no process that trains"):
        shared_secret(peers, has_begun=True)
    assert not peers.exists()
    monkeypatch.setattr(secret, "BACK_SECONDS", 60)
    later = threading.Timer(0.2, put_back, (peers, first))
    later.start()
    assert shared_secret(peers, has_begun=True) == first
    later.join()
    assert set(modes(peers).values()) == {0o600}
    os.unlink(peers / "secret")
    os.mkfifo(peers / "secret")
    with pytest.raises(OSError, match="wanted a regular file, got a FIFO"):
        shared_secret(peers, has_begun=True)


@pytest.mark.slow
def test_a_run_of_peers_that_has_begun_keeps_its_secret(tmp_path, monkeypatch):
    config = as_process(0, 2, num_steps=2)
    monkeypatch.setattr(secret, "BACK_SECONDS", 0.1)
    train(config, tmp_path)
    shutil.rmtree(tmp_path / "peers")
    for number in (0, 1):
        with pytest.raises(ValueError, match="start them again"):
            train(as_process(number, 2, num_steps=4), tmp_path)
    assert not (tmp_path / "peers").exists()


@pytest.mark.nightly
def test_a_process_comes_back_though_the_folder_of_peers_was_removed(tmp_path):
    def process(number: int):
        place = f"--distributed.process-id {number} --distributed.num-processes 2"
        run = (*TRAIN, LINE, *PEERS, *SLOW, "--run-dir", str(tmp_path))
        return started(*run, "--distributed.enabled", *place.split())

    peers = tmp_path / "peers"
    with process(0) as first:
        with process(1) as killed:
            wait_until(lambda: min(last_step(tmp_path, i) for i in (0, 1)) > 3)
            before = (peers / "secret").read_bytes()
            killed.kill()
            killed.communicate()
        shutil.rmtree(peers)
        ahead = max(last_step(tmp_path, i) for i in (0, 1))  # Either may be.
        with process(1) as again:
            wait_until(lambda: last_step(tmp_path, 1) > ahead)
            assert (peers / "secret").read_bytes() == before
            names = {path.name for path in peers.iterdir()}
            again.terminate()
            output = ended(again)
        assert re.search(r"goes on with a peer's model at step \d+", output)
        assert names == {"secret", *(f"worker-{i}" for i in range(4))}
        first.terminate()
        output = ended(first)
    assert f"warning: {peers}/secret was removed while the run trains" in output
    assert "refused" not in output


@pytest.mark.nightly
def test_a_process_with_another_secret_is_named_and_the_others_go_on(tmp_path):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    other.write_text("of another run" * 2)
    other.chmod(0o600)

    def process(number: int, *options: str):
        place = f"--distributed.process-id {number} --distributed.num-processes 2"
        run = (*TRAIN, LINE, *PEERS, *SLOW, "--run-dir", str(run_dir))
        return started(*run, "--distributed.enabled", *place.split(), *options)

    with contextlib.ExitStack() as jobs:
        first = jobs.enter_context(process(0))
        # A record of the other without a secret here would be that of an earlier run.
        wait_until((run_dir / "peers" / "secret").exists)
        last = jobs.enter_context(process(1, "--exchange.secret-file", str(other)))
        for i in (0, 1):  # A busy machine may be late with one.
            rows = functools.partial(read_metrics, run_dir / f"process-{i}")
            wait_until(lambda rows=rows: any("loss" in row for row in rows()))
        outputs = []
        before = len(read_metrics(run_dir / "process-0"))
        wait_until(lambda: len(read_metrics(run_dir / "process-0")) > before + 60)
        for job in (first, last):
            job.terminate()
            outputs.append(ended(job))
    for number, output in enumerate(outputs):
        found = re.findall(r"warning: refused worker (\d) at 127.0.0.1:\d+, .*", output)
        assert set(found) == {str(w) for w in range(4) if w // 2 != number}
        assert "it does not have this run's secret; start it with" in output
        assert "stopped after step" in output
    assert process_id(run_dir, 0)
