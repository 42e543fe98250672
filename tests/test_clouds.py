"""k8s/trainjob.yaml and skypilot.yaml: their keys, and their commands with their variables.

No cluster and no cloud is used: two processes of this machine take the place of two nodes.
"""

import shlex
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import free_port
from running import SAME_FOR_BOTH, Project, finish, planted, small, start

# What SkyPilot 0.14 documents, as far as the file may use it.
TASK_KEYS = {
    *("name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "volumes"),
    *("setup", "run", "config"),
}
RESOURCE_KEYS = {
    *("infra", "accelerators", "cpus", "memory", "instance_type", "use_spot", "disk_size"),
    *("disk_tier", "network_tier", "image_id", "job_recovery"),
}
STORAGE_KEYS = {"name", "source", "store", "mode", "persistent"}
RECOVERY_KEYS = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}


def read(project: Project, name: str, **changes: str) -> dict[str, Any]:
    text = (project.folder / name).read_text()
    for old, new in changes.items():
        assert f"/{old}" in text
        text = text.replace(f"/{old}", new)
    return yaml.safe_load(text)


@SAME_FOR_BOTH
class TestTrainJob:
    def test_is_what_kubeflow_publishes(self, project: Project) -> None:
        """from_dict refuses wrong types and drops keys that it does not know."""
        models = pytest.importorskip("kubeflow_trainer_api.models", reason="requirements.txt")
        job = read(project, "k8s/trainjob.yaml")
        assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
        (patch,) = job["spec"]["runtimePatches"]
        (nodes,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = nodes["template"]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > 120  # STOP_SECONDS of the launcher
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}

    def test_trains(self, project: Project, data: Path, tmp_path: Path) -> None:
        """With the variables of the runtime torch-distributed; its LOG_DIR on the shared volume."""
        (tmp_path / "data").symlink_to(data)
        trainer = read(project, "k8s/trainjob.yaml", shared=str(tmp_path))["spec"]["trainer"]
        bare = planted(project, tmp_path / "bare").folder
        mark, env = uuid.uuid4().hex, {each["name"]: each["value"] for each in trainer["env"]}
        env.update(PET_NNODES=str(trainer["numNodes"]), PET_NPROC_PER_NODE="1", NPROC="")
        env.update(PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=str(free_port()))
        command = [*trainer["command"], *trainer["args"], *small(data)]
        nodes = [
            start(command, mark, cwd=bare, PET_NODE_RANK=str(node), **env) for node in range(2)
        ]
        done = [finish(node, mark).ok() for node in nodes]
        assert "\n2 rank(s) on CPU" in done[0].out
        folder = tmp_path / "runs" / "my-run"
        assert (folder / "best.pt").exists()
        logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
        assert "\n2 rank(s) on CPU" in logs[0]
        assert logs[1].startswith("--- ")


@SAME_FOR_BOTH
class TestSkyPilot:
    def test_keys(self, project: Project) -> None:
        task = read(project, "skypilot.yaml")
        assert set(task) <= TASK_KEYS
        assert set(task["resources"]) <= RESOURCE_KEYS
        recovery = task["resources"]["job_recovery"]
        assert set(recovery) <= RECOVERY_KEYS
        assert recovery["recover_on_exit_codes"] == [75]  # STOPPED, of protocol.py
        for mount in task["file_mounts"].values():
            assert isinstance(mount, str) or set(mount) <= STORAGE_KEYS
        assert (project.folder / task["setup"].split()[-1]).exists()

    def test_trains(self, project: Project, data: Path, tmp_path: Path) -> None:
        (tmp_path / "data").symlink_to(data)
        task = read(project, "skypilot.yaml", data=f"{tmp_path}/data", outputs=f"{tmp_path}/out")
        bare = planted(project, tmp_path / "bare").folder
        mark, ips = uuid.uuid4().hex, ["127.0.0.1"] * task["num_nodes"]
        env = {"SKYPILOT_NUM_NODES": str(len(ips)), "SKYPILOT_NODE_IPS": "\n".join(ips)}
        env["MASTER_PORT"] = str(free_port())
        words = shlex.join([*small(data), "--resume", "never"])
        command = ["bash", "-c", f"{task['run'].strip()} {words}"]
        nodes = [
            start(command, mark, 1, bare, SKYPILOT_NODE_RANK=str(node), **env) for node in range(2)
        ]
        done = [finish(node, mark).ok() for node in nodes]
        assert "\n2 rank(s) on CPU" in done[0].out
        assert (tmp_path / "out" / "my-run" / "best.pt").exists()
