"""Job files run by the shell, with commands in the place of a cluster's."""

import configparser
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from tests.checkout import ENV, ROOT
from tests.jobs import LONG, ROUNDS, lives, read_lines, wait_until
from train.cli.new_run import read_new_run
from train.config import PeerExchange
from train.job.processes import FINAL
from train.launch import elastic_arguments, read
from train.slurm import JobFile, manifest, sbatch

COMMANDS = {
    # Each start takes the next code, and the last one waits for a signal.
    "srun": """#!/bin/bash
echo "$@" >> calls
trap 'echo stopped >> calls; exit 0' TERM
code=$(sed -n "$(grep -c srun.options calls)p" codes)
if [[ $code == wait ]]; then echo ready; while true; do sleep 0.05; done; fi
exit "$code"
""",
    "scontrol": '#!/bin/bash\necho "$@" >> calls',
    ".venv/bin/decentjax": f'#!/bin/bash\nexec {sys.executable} -m decentjax "$@"',
}


def install(folder: Path, **commands: str) -> None:
    for name, text in (COMMANDS | commands).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("srun.options", "cpus-per-task"))
        (folder / name).chmod(0o755)


@contextlib.contextmanager
def started(folder: Path, script: Path, *arguments: str, **variables: str):
    """A job of Slurm, whose commands are in the folder; killed where it still runs."""
    slurm = dict.fromkeys(("CPUS_PER_TASK", "NTASKS", "NTASKS_PER_NODE"), "8")
    slurm |= {"JOB_ID": "123"} | variables
    with subprocess.Popen(
        ["bash", str(script), *arguments],
        cwd=folder,
        env={**ENV, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        | {f"SLURM_{name}": value for name, value in slurm.items()}
        | {"PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as job:
        try:
            yield job
        finally:
            job.kill()


@pytest.mark.parametrize(
    ("codes", "signum", "ended", "again"),
    [
        ("0", None, 0, False),
        ("1", None, 1, False),
        ("71", None, 71, False),
        ("70 137 0", None, 0, False),
        ("70 wait", signal.SIGUSR1, 0, True),
        ("wait", signal.SIGTERM, 143, False),  # As scancel does.
    ],
)
def test_slurm_queues_a_run_again(codes, signum, ended, again, tmp_path):
    """Ahead of the time limit, and after no failure: these start it again at once."""
    install(tmp_path)
    (tmp_path / "codes").write_text("\n".join(codes.split()))
    script = ROOT / "configs" / "cluster.sbatch"
    with started(tmp_path, script, "configs/a.py") as job:
        if signum:
            while b"ready" not in (line := read_lines(job, 1)[0]):
                assert line
            job.send_signal(signum)
        assert job.wait(60) == ended
    calls = (tmp_path / "calls").read_text().splitlines()
    starts, rest = len(codes.split()), calls[len(codes.split()) :]
    wanted = "decentjax train configs/a.py --auto-resume --distributed.enabled"
    assert all(wanted in call for call in calls[:starts])
    assert rest == ["stopped"] * (signum is not None) + ["requeue 123"] * again


SHORT = (
    *(
        "--exchange",
        "quorum",
        "--exchange.silent-seconds",
        "2",
        "--exchange.bind",
        "lo",
    ),
    *("--task.step-seconds", "0.03", "--num-steps", "400", "--log.every-steps", "20"),
)


def step_of(folder: Path) -> int:
    """The last step that a process has logged."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def pid_of(folder: Path) -> int:
    """The process that has locked a folder."""
    return int((folder / "lock").read_text().split()[1])


@pytest.mark.slow
def test_peers_of_slurm_lose_a_process_and_a_node_is_queued_again(tmp_path):
    """Two tasks of an array, each with a process: one is killed, then told to end."""
    install(tmp_path, srun='#!/bin/bash\nshift 2\nexec "$@"')
    line, run = JobFile(config=ROOT / "tests" / "line.py", nodes=2, gpus=0), "run"
    script = tmp_path / "job.sbatch"
    script.write_text(sbatch(line, [*ROUNDS, *SHORT], sys.executable))
    assert "--kill-on-bad-exit=1" not in script.read_text()

    def task(number: int):
        own = {"ARRAY_TASK_ID": str(number), "ARRAY_TASK_COUNT": "2"}
        own |= {"JOB_ID": f"12{number}"}
        return started(tmp_path, script, "--run-dir", run, **own)

    folders = [tmp_path / run / f"process-{number}" for number in range(2)]
    with task(0) as first, task(1) as second:
        outputs = [b"", b""]
        threads = [
            read_in_thread(first, outputs, 0),
            read_in_thread(second, outputs, 1),
        ]
        wait_until(lambda: min(map(step_of, folders)) >= 40)
        killed = pid_of(folders[1])
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: pid_of(folders[1]) != killed)
        before = step_of(folders[1])
        wait_until(lambda: step_of(folders[1]) > before)
        second.send_signal(signal.SIGUSR1)
        assert second.wait(LONG) == 0
        assert (tmp_path / "calls").read_text() == "requeue 121\n"
        with task(1) as second:  # As Slurm does.
            threads.append(read_in_thread(second, outputs, 1))
            assert second.wait(LONG) == 0
            assert first.wait(LONG) == 0
        for thread in threads:
            thread.join()
    assert outputs[1].count(b"killed by SIGKILL; started again") == 1
    assert b"started again" not in outputs[0]
    assert b"all 400 steps are done" in outputs[0]
    assert b"all 400 steps are done" in outputs[1]


def read_in_thread(job: subprocess.Popen, outputs: list[bytes], at: int):
    """A process whose output nobody reads would wait."""

    def read() -> None:
        assert job.stdout is not None
        for line in job.stdout:
            outputs[at] += line

    thread = threading.Thread(target=read)
    thread.start()
    return thread


class Pods:
    """A local loop in the place of Kubernetes' controller: pods of an Indexed job.

    Args:
      text: the manifest.
      volume: folder in the place of its volume.
    """

    def __init__(self, text: str, volume: Path):
        (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
        self.spec = job["template"]["spec"]
        assert self.spec["completionMode"] == "Indexed"
        assert self.spec["template"]["spec"]["restartPolicy"] == "Never"
        (self.container,) = self.spec["template"]["spec"]["containers"]
        self.volume, self.codes, self.running = volume, {}, {}
        (address,) = self.container["env"]
        assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        self.env = {**ENV, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.env |= {address["name"]: "127.0.0.1"}
        self.env |= {"PATH": f"{volume}:{os.environ['PATH']}"}
        for index in range(self.spec["completions"]):
            self.codes[index] = []
            self.start(index)

    def words(self, words: list[str], index: int) -> list[str]:
        for name, value in {
            "POD_IP": "127.0.0.1",
            "JOB_COMPLETION_INDEX": index,
        }.items():
            words = [word.replace(f"$({name})", str(value)) for word in words]
        return [word.replace("/runs/", f"{self.volume}/runs/") for word in words]

    def start(self, index: int) -> None:
        words = self.words(self.container["args"], index)
        self.running[index] = subprocess.Popen(
            [sys.executable, "-m", "decentjax", *words],
            env=self.env | {"JOB_COMPLETION_INDEX": str(index)},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )

    def probe(self, name: str, index: int) -> bool:
        words = self.words(self.container[name]["exec"]["command"], index)
        env = self.env | {"JOB_COMPLETION_INDEX": str(index)}
        return subprocess.run(words, env=env).returncode == 0

    def poll(self) -> bool:
        """Replaces pods by the policy; returns whether all have ended."""
        (final, disrupted) = self.spec["podFailurePolicy"]["rules"]
        assert final["action"] == "FailIndex"
        assert final["onExitCodes"]["operator"] == "In"
        assert disrupted["action"] == "Ignore"
        for index, pod in [*self.running.items()]:
            if (code := pod.poll()) is None:
                continue
            del self.running[index]
            code = 128 - code if code < 0 else code
            self.codes[index].append(code)
            if code and code not in final["onExitCodes"]["values"]:
                assert len(self.codes[index]) <= self.spec["backoffLimitPerIndex"]
                self.start(index)
        return not self.running

    def kill(self) -> None:
        for pod in self.running.values():
            pod.kill()
            pod.wait()


@pytest.mark.slow
def test_a_pod_of_peers_is_replaced_alone(tmp_path):
    """One pod is killed, then drained: the other one never ends."""
    text = '#!/bin/bash\nexec python -m decentjax "$@"'.replace(
        "python", sys.executable
    )
    (tmp_path / "decentjax").write_text(text)
    (tmp_path / "decentjax").chmod(0o755)
    line = JobFile(config=Path("tests/line.py"), nodes=2, gpus=0, jobset=True)
    pods = Pods(manifest(line, [*ROUNDS, *SHORT]), tmp_path)
    (values,) = [
        rule["onExitCodes"]["values"]
        for rule in pods.spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    ]
    assert {0, *values} == {*FINAL}
    folders = [tmp_path / "runs" / "line" / f"process-{index}" for index in range(2)]
    try:
        assert not pods.probe("readinessProbe", 1)
        wait_until(lambda: min(map(step_of, folders)) >= 40)
        assert pods.probe("readinessProbe", 1)
        assert pods.probe("livenessProbe", 1)
        trained = pid_of(folders[1])
        pods.running[1].kill()
        wait_until(lambda: not lives(trained))
        wait_until(lambda: pods.poll() or pods.codes[1] == [137])
        before = step_of(folders[1])
        wait_until(lambda: step_of(folders[1]) > before)
        pods.running[1].terminate()
        wait_until(pods.poll)
    finally:
        pods.kill()
    assert pods.codes == {0: [0], 1: [137, 143, 0]}


@pytest.mark.slow
def test_a_pod_that_cannot_be_is_not_replaced(tmp_path):
    (tmp_path / "decentjax").symlink_to(shutil.which("false") or "")
    pods = Pods((ROOT / "configs" / "peers.yaml").read_text(), tmp_path)
    try:
        wait_until(pods.poll)
    finally:
        pods.kill()
    assert pods.codes == {index: [1] for index in range(4)}


def test_the_service_of_the_guide_knows_the_codes_and_the_launcher():
    page = (ROOT / "docs" / "guides" / "peers-on-machines.md").read_text()
    unit = configparser.ConfigParser()
    unit.read_string(page.partition("```ini\n")[2].partition("```")[0])
    service = unit["Service"]
    codes = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert {0, *codes} == {*FINAL}
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("decentjax", "launch")
    options, (module, *rest) = read(arguments)
    assert (options.first_process, options.places, options.elastic) == (2, 4, True)
    options = [*elastic_arguments(rest)[1:], "--distributed.enabled"]
    assert module == "train"
    exchange = read_new_run(Path(rest[0]), options).config.exchange
    assert isinstance(exchange, PeerExchange)
    assert exchange.elastic
