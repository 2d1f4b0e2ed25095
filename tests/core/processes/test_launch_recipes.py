"""The recipes of examples/launch: run as far as one machine allows, and read for what they must say."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from helpers import programs as forked
from helpers.places import ROOT

RECIPES = ROOT / "examples" / "launch"

SCRIPT = """
import sys, torch, tpcore
ctx = tpcore.init(tp=2)
total = int(ctx.world.all_reduce(torch.tensor([ctx.rank + 1])))
print(f"rank {ctx.rank} of {ctx.mesh.size}: {total} {sys.argv[1]}", flush=True)
tpcore.shutdown()
"""
# What Slurm's commands do on a cluster, on this machine alone: one host name, one task a node. And torchrun,
# which an environment without console scripts has as a module only.
COMMANDS = {
    "scontrol": '[ "$1 $2" = "show hostnames" ] && echo localhost',
    "srun": """
for task in 1 2; do "$@" & tasks="$tasks $!"; done
for task in $tasks; do wait $task || exit 1; done
""",
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


SAVES = """
import torch, tpcore
from pathlib import Path
ctx = tpcore.init(tp=2)
with tpcore.Preemption() as preemption:
    for step in range(10**9):
        ctx.world.all_reduce(torch.ones(1))
        if step == 20:
            print("trains\\n", end="", flush=True)  # in one write: another rank's stands beside it otherwise
        if preemption.requested():
            Path(f"rank{ctx.rank}").write_text(str(step))
            preemption.leave()
"""


@contextmanager
def slurm(tmp_path: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    """``sbatch slurm.sh train.py flag`` over two hosts, as far as one machine has them. What fails ends the job."""
    for name in ("slurm.sh", "torchrun.sh"):
        shutil.copy(RECIPES / name, tmp_path)
    (tmp_path / "train.py").write_text(script)
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "PER_NODE": "1",
        "PORT": str(port),
        "TPCORE_BACKEND": "cpu_gloo",
        "OMP_NUM_THREADS": "1",
    }
    words = ["bash", "slurm.sh", "train.py", "flag"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env=env, **pipes) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                    process.kill()


@pytest.mark.slow
@pytest.mark.processes
def test_the_slurm_recipe_starts_one_job_of_two_launchers(tmp_path: Path) -> None:
    """Two torchruns that meet by rendezvous, as on two hosts; their ranks are of one job."""
    with slurm(tmp_path, SCRIPT) as job:
        out, err = job.communicate(timeout=forked.PATIENCE)
    assert job.returncode == 0, err
    assert sorted(re.findall(r"rank \d of 2: 3 flag", out)) == ["rank 0 of 2: 3 flag", "rank 1 of 2: 3 flag"]


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_save_when_slurm_ends_the_job(tmp_path: Path) -> None:
    """As scancel does, SIGTERM goes to every process of the job's step at once: launchers and ranks."""
    with slurm(tmp_path, SAVES) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "trains\n"
        for process in psutil.Process(job.pid).children(recursive=True):
            if process.name().startswith(("python", "pt_elastic")):  # as torchrun names itself
                process.send_signal(signal.SIGTERM)
        job.communicate(timeout=forked.PATIENCE)
    assert job.returncode != 0  # which --requeue starts again
    steps = [int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert steps[0] == steps[1] >= 20


def documents(name: str) -> dict[str, Any]:
    return {d["kind"]: d for d in yaml.safe_load_all((RECIPES / name).read_text())}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-neuron.yaml"])
def test_a_manifest_says_what_a_job_of_several_hosts_needs(name: str) -> None:
    found = documents(name)
    service, job = found["Service"], found["Job"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert all(isinstance(value, str) for value in env.values())  # numbers are refused there

    # the pods have numbers, one of which is known by name before any has started
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(env["NODES"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["HEAD"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"

    # what it mounts is there, shared memory in memory and within the limit
    volumes = {v["name"]: v for v in pod["volumes"]}
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/checkpoints"]]
    assert pod["restartPolicy"] == "Never"
    assert spec["backoffLimit"] == 0
    limits = container["resources"]["limits"]
    devices = {key: value for key, value in limits.items() if "/" in key or key.startswith("hugepages")}
    assert devices.items() <= container["resources"]["requests"].items()

    # the variables are those that the script reads
    script = (RECIPES / "torchrun.sh").read_text()
    asked = set(re.findall(r"\$\{(\w+)[:}]", script))
    assert {"HEAD", "NODES"} <= asked
    assert set(env) - {"TPCORE_BACKEND"} <= asked
    assert "/app/torchrun.sh" in " ".join(container["command"])


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sh", "efa.sh"])
def test_shell_scripts_parse(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(RECIPES / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_names_every_recipe() -> None:
    page = (ROOT / "docs" / "launching.md").read_text()
    for recipe in RECIPES.iterdir():
        assert f"`examples/launch/{recipe.name}`" in page


def test_a_trainjob_starts_what_the_indexed_job_does() -> None:
    """As the CRD of Kubeflow Trainer 2.2 has it, whose controller sets PET_* for torchrun."""
    job, pods = documents("trainjob.yaml")["TrainJob"], documents("kubernetes.yaml")["Job"]["spec"]
    assert (job["apiVersion"], job["spec"]["runtimeRef"]) == (
        "trainer.kubeflow.org/v1alpha1",
        {"name": "torch-distributed"},
    )
    trainer, pod = job["spec"]["trainer"], pods["template"]["spec"]
    container = pod["containers"][0]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert trainer["command"] == ["torchrun", container["command"][-1]]
    assert (str(trainer["numNodes"]), str(trainer["numProcPerNode"])) == (env["NODES"], env["PER_NODE"])
    assert not [entry["name"] for entry in trainer["env"] if entry["name"].startswith("PET_")]  # refused by it
    assert (trainer["image"], trainer["resourcesPerNode"]) == (container["image"], container["resources"])
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patched = node["template"]["spec"]["template"]["spec"]
    assert patched["volumes"] == pod["volumes"]
    assert patched["containers"] == [{"name": node["name"], "volumeMounts": container["volumeMounts"]}]
