"""Job files that are filled in: what they run, and that they are the shipped ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.checkout import ROOT
from train.cli.new_run import read_new_run
from train.launch import read
from train.slurm import JobFile, _label, main, manifest, sbatch

TEMPLATE = (ROOT / "configs" / "cluster.sbatch").read_text()


def job(**options) -> JobFile:
    return JobFile(**{"config": Path("quickstart"), **options})


def test_a_script_differs_from_the_shipped_one_where_it_is_filled_in():
    made = sbatch(job(nodes=2, gpus=4, cpus=3, hours=1.5), ["--lr", "1"], "/env/python")
    lines = [
        (old, new)
        for old, new in zip(TEMPLATE.splitlines(), made.splitlines(), strict=True)
        if old != new
    ]
    assert [new for _, new in lines] == [
        "# The run quickstart: sbatch FILE [OPTION ...]",
        "#SBATCH --job-name=quickstart",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=3",
        "#SBATCH --time=01:30:00",
        "exec /env/python -m decentjax requeue --max-restarts 5 \\",
        '  /env/python -m decentjax train quickstart --lr 1 "$@" --auto-resume '
        "--distributed.enabled \\",
    ]
    assert "gpus" not in re.sub("# .*", "", sbatch(job(gpus=0), [], "python"))


def test_a_script_runs_the_config_wherever_it_starts(tmp_path, monkeypatch):
    """By the shell, with commands in the place of Slurm's."""
    text = "from train.cli.load import load_config\nfrom pathlib import Path\n"
    (tmp_path / "own config.py").write_text(
        text + "config = load_config(Path('quickstart'))\n"
    )
    monkeypatch.chdir(tmp_path)
    made = sbatch(
        job(config=Path("own config.py")), ["--init-from", "a b"], "my python"
    )
    (tmp_path / "job.sbatch").write_text(made)
    (tmp_path / "my python").write_text(
        "#!/bin/bash\npython3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "
        '"$@"\n'
    )
    (tmp_path / "my python").chmod(0o755)
    names = "SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"
    given = dict.fromkeys(names, "8") | {"SLURM_JOB_ID": "1"}
    done = subprocess.run(
        ["bash", "job.sbatch", "--seed", "3"],
        env={**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
    )
    arguments = json.loads(done.stdout)
    at = arguments.index("my python")
    assert arguments[: at - 2] == [
        *("-m", "decentjax", "requeue", "--max-restarts", "5", "srun"),
    ]
    assert arguments[at + 1 : at + 9] == [
        *("-m", "decentjax", "train", str(tmp_path / "own config.py")),
        *("--init-from", "a b", "--seed", "3"),
    ]


def shown_by_shell(made: str, folder: Path) -> list[str]:
    """The words after the interpreter of the command that a script runs in the end."""
    (folder / "job.sbatch").write_text(made)
    (folder / "python").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (folder / "python").chmod(0o755)
    done = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=folder,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
    )
    words = done.stdout.splitlines()
    return words[len(words) - words[::-1].index("decentjax") :]


@pytest.mark.parametrize("apart", [False, True])
def test_each_worker_of_a_script_has_its_gpus(apart, tmp_path, capsys, monkeypatch):
    """Two nodes of four GPUs, and so eight processes, two for each worker."""
    two = ["quickstart", "--nodes", "2", "--gpus", "4", "--processes-per-worker", "2"]
    main([*two, *(["--", *QUORUM] if apart else [])])
    made = capsys.readouterr().out.replace(sys.executable, "python")
    counts = {"NTASKS": "8", "NTASKS_PER_NODE": "4", "CPUS_PER_TASK": "8"}
    if apart:
        counts |= {"ARRAY_TASK_COUNT": "2", "ARRAY_TASK_ID": "1"}
        assert "#SBATCH --ntasks-per-node=1\n" in made
    else:
        assert "#SBATCH --ntasks-per-node=4\n" in made
    for name, value in counts.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    command, *words = shown_by_shell(made, tmp_path)
    per_worker = []
    if apart:
        options, (_, *words) = read(words)
        assert command == "launch"
        assert (options.processes, options.places) == (4, 8)
        assert options.processes_per_worker == 2
        per_worker = ["--workers.processes-per-worker", "2"]  # By the launcher.
    config = read_new_run(Path(words[0]), [*words[1:], *per_worker]).config
    workers = config.workers
    assert (workers.num_workers, workers.devices_per_worker) == (4, 2)
    assert (workers.processes_per_worker, workers.workers_per_node) == (2, 2 - apart)


QUORUM = [
    *("--method", "rounds", "--topology.name", "complete", "--exchange", "quorum"),
    *("--exchange.bind", "ib0"),
]
RING = ["--exchange", "peers", "--topology.name", "ring", "--exchange.bind", "ib0"]


def test_a_node_of_peers_is_a_job_of_its_own():
    """Whose end ends no other."""
    made = sbatch(job(nodes=3, gpus=4, cpus=2), QUORUM, "/env/python")
    lines = made.splitlines()
    assert {
        *("#SBATCH --array=0-2", "#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1"),
        *("#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=8", "processes=4"),
    } <= {*lines}
    assert "--kill-on-bad-exit=1" not in made
    assert '--places "$places" --elastic quickstart --method rounds' in made
    assert "--elastic" not in (one := sbatch(job(nodes=2, gpus=1), RING, "python"))
    assert '--places "$places" --max-restarts=5 quickstart --exchange peers' in one


def test_a_manifest_of_peers_looks_into_their_folder():
    more = ["--run-dir", "/runs/own"]
    made = yaml.safe_load(manifest(job(nodes=2, gpus=1), [*QUORUM, *more]))
    assert "failurePolicy" not in made["spec"]
    (workers,) = made["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 2
    (container,) = spec["template"]["spec"]["containers"]
    assert "--places=2" in container["args"]
    assert container["args"][-len(QUORUM) - 2 :] == [*QUORUM, *more]
    for probe in ("readinessProbe", "livenessProbe"):
        (*_, words) = container[probe]["exec"]["command"]
        assert " /runs/own/process-$JOB_COMPLETION_INDEX/metrics.jsonl" in words


@pytest.mark.parametrize("apart", [False, True])
def test_a_pod_of_peers_is_a_worker_and_of_a_job_a_process(apart, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    workers = {"nodes": 2, "gpus": 4, "processes_per_worker": 2}
    options = ["--workers.devices-per-worker=2", *(QUORUM if apart else ())]
    made = yaml.safe_load(manifest(job(**workers), options))
    (one,) = made["spec"]["replicatedJobs"]
    spec = one["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["parallelism"] == spec["completions"] == (4 if apart else 8)
    limits = container["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 2 if apart else 1}
    words = container["args"]
    assert "--workers.num-workers=4" in words
    if not apart:
        assert "--workers.processes-per-worker=2" in words
        assert "--distributed.num-processes=8" in words
        return
    launched, _ = read(words[words.index("launch") + 1 :])
    assert (launched.processes, launched.processes_per_worker) == (2, 2)
    assert (launched.places, launched.first_process) == (8, "JOB_COMPLETION_INDEX")


def test_a_manifest_has_a_pod_for_each_process():
    options = ["--trust", "it's"]
    text = manifest(job(config=Path("quickstart_diloco"), nodes=2, gpus=4), options)
    made = yaml.safe_load(text)
    assert made["metadata"]["name"] == "quickstart-diloco"
    (workers,) = made["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 8
    (container,) = spec["template"]["spec"]["containers"]
    assert container["args"][:2] == ["train", "quickstart_diloco"]
    assert container["args"][-2:] == options
    assert "--distributed.num-processes=8" in container["args"]
    assert "--run-dir=/runs/quickstart_diloco" in container["args"]
    host = "quickstart-diloco-workers-0-0.quickstart-diloco:5000"
    assert f"--distributed.coordinator={host}" in container["args"]
    assert "resources" in container
    alone = manifest(job(gpus=0, image="mine:1"), [])
    (workers,) = yaml.safe_load(alone)["spec"]["replicatedJobs"]
    (container,) = workers["template"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "mine:1"
    assert "resources" not in container


@pytest.mark.parametrize("count", [1, 128])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("3d_unet", "run-3d-unet"),
        ("_a", "a"),
        ("A-_-b-", "a-b"),
        ("123", "run-123"),
        ("true", "true"),  # No boolean of YAML.
        ("-", "run"),
        ("数据", "run-[0-9a-f]{6}"),
        ("模型", "run-[0-9a-f]{6}"),
        ("résumé", "r-sum-[0-9a-f]{6}"),
        ("a" * 70, "a+-[0-9a-f]{6}"),
        ("a" * 69 + "b", "a+-[0-9a-f]{6}"),
        ("b" * 30 + "_" * 20 + "c" * 20, "b+-c+-[0-9a-f]{6}"),
    ],
)
def test_a_label_is_one_of_kubernetes(name, wanted, count, tmp_path):
    """By RFC 1035, with what JobSet appends to it for its pods."""
    path = tmp_path / "a #b: 'c.py"
    path.write_text(
        "import dataclasses\nfrom configs.quickstart import config\n"
        f"config = dataclasses.replace(config, name={name!r})\n"
    )
    image = "own:1 # x"
    made = yaml.safe_load(manifest(job(config=path, gpus=count, image=image), []))
    label = made["metadata"]["name"]
    assert re.fullmatch(wanted, label)
    pod = f"{label}-workers-0-{count - 1}-abcde"
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", pod)
    assert len(pod) <= 63
    assert made["spec"]["network"]["subdomain"] == label
    (workers,) = made["spec"]["replicatedJobs"]
    (container,) = workers["template"]["spec"]["template"]["spec"]["containers"]
    host = f"{label}-workers-0-0.{label}:5000"
    assert f"--distributed.coordinator={host}" in container["args"]
    assert container["args"][1] == str(path)
    assert container["image"] == image
    assert f"--run-dir=/runs/{name}" in container["args"]


def test_labels_of_different_names_differ():
    names = ["数据", "模型", "a" * 70, "a" * 69 + "b", "run"]
    assert len({_label(name, 45) for name in names}) == len(names)


def test_the_command_prints_it(capsys):
    main(["quickstart", "--nodes", "2", "--", "--num-steps", "5"])
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in script
    assert script.startswith("#!")  # The note on a short warm-up is no part of it.
    assert 'train quickstart --num-steps 5 "$@"' in script
    main(["quickstart", "--jobset"])
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "JobSet"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstrt"], "did you mean quickstart"),
        (
            ["quickstart", "--gpus", "4", "--processes-per-worker", "3"],
            "a worker is on one node, .* --processes-per-worker must divide 4, got 3",
        ),
        (
            ["quickstart", "--gpus", "0", "--processes-per-worker", "2"],
            "--processes-per-worker must divide 1, got 2",
        ),
        (
            ["quickstart", "--processes-per-worker", "0"],
            "--processes-per-worker must divide 8, got 0",
        ),
        (["quickstart", "--nodes", "0"], "at least one node, .* got nodes = 0"),
        (["quickstart", "--hours", "inf"], "0.1 to 8760 hours, .* hours = inf"),
        (["quickstart", "--hours", "0.01"], "hours = 0.01"),
        (["quickstart", "--gpus", "-1"], "gpus = -1"),
        (["quickstart", "--hours", "nan"], "hours = nan"),
        (["quickstart", "--gpu", "2"], "no option --gpu: did you mean --gpus"),
        ([], "missing CONFIG"),
        (["quickstart", "--", "--lrr", "3"], "no option --lrr: "),
        (["quickstart", "--jobset", "--", "--lr", "a"], "learning-rate must be a num"),
        (["quickstart", "--nodes", "3"], "to be a power of two, got 3"),
        (
            ["quickstart", "--nodes", "2", "--", *RING[:-2]],
            "peers of several nodes listen at their network: after -- give --exchang",
        ),
    ],
)
def test_a_job_that_cannot_be_gets_a_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    assert re.search(words, f"{shown.err}{ended.value.code}")
    assert not shown.out
