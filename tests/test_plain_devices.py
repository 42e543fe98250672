"""Which device a rank takes, on machines that are only told of: GPUs of each kind, or none."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddpkit.errors import UserError
from ddpkit.ranks import devices, environment, protocol

Env = dict[str, str]
UUIDS = ["GPU-ab1", "GPU-ab2", "GPU-c3"]
LISTED = "".join(f"GPU {n}: Some (UUID: {uuid})\n" for n, uuid in enumerate(UUIDS))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this a node where nvidia-smi, if there is one, prints a text, and torch sees devices."""

    def node(says: str | None = None, kind: str = "cuda", seen: int = 0, **env: str) -> None:
        monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}:/bin", **env})
        monkeypatch.setattr(environment, "GPU_FILES", [tmp_path / "device"])
        tool = tmp_path / "nvidia-smi"
        tool.unlink(missing_ok=True)
        if says is not None:
            tool.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
            tool.chmod(0o755)
        for name, value in {
            "is_available": seen > 0,
            "device_count": seen,
            "current_accelerator": torch.device(kind),
        }.items():
            monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
        for module in (torch.cuda, torch.xpu):
            monkeypatch.setattr(module, "get_device_properties", lambda _: SimpleNamespace())

    return node


class TestCount:
    @pytest.mark.parametrize(
        ("text", "count"),
        [
            *((None, 3), ("0,1,2", 3), (" 0, 2", 2), ("2", 1), ("1gpu,2", 2)),
            *(("", 0), (" ", 0), ("-1", 0), ("NoDevFiles", 0), ("none", 0), ("void", 0)),
            *(("0,1,-1,2", 2), ("0,,1", 1), ("GPU-ab1,GPU-c", 2), ("MIG-1/2/3", 1)),
        ],
    )
    def test_as_cuda_reads_them(self, text: str | None, count: int, node: Callable) -> None:
        node(LISTED, **({} if text is None else {environment.GPUS: text}))
        assert environment.count_gpus() == count

    def test_without_nvidia_smi(self, node: Callable, tmp_path: Path) -> None:
        """Torch counts if there is a device."""
        node(seen=5)
        assert environment.count_gpus() == 0
        (tmp_path / "device").touch()
        assert environment.count_gpus() == 5
        node(seen=4, CUDA_VISIBLE_DEVICES="")
        assert environment.count_gpus() == 0


class TestPick:
    @pytest.mark.parametrize(
        ("kind", "seen", "env", "device"),
        [
            ("cuda", 4, {}, "cuda:0"),
            ("cuda", 4, {"LOCAL_RANK": "3"}, "cuda:3"),
            ("cuda", 1, {"LOCAL_RANK": "3", "RANK": "3", "WORLD_SIZE": "4"}, "cuda:0"),
            ("cuda", 2, {"LOCAL_RANK": "3", "RANK": "3", "WORLD_SIZE": "4"}, "cuda:1"),
            ("cuda", 4, {"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
            ("xpu", 4, {"LOCAL_RANK": "2"}, "xpu:2"),
            ("xpu", 4, {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
            ("mps", 1, {}, "cpu"),
            ("cuda", 0, {}, "cpu"),
        ],
    )
    def test_devices(self, kind: str, seen: int, env: Env, device: str, node: Callable) -> None:
        node(kind=kind, seen=seen, **env)
        found, note = devices.pick()
        assert found == torch.device(device)
        assert note["device"] == found.type
        assert devices.pick(on_cpu=True)[0] == devices.CPU

    def test_gpus_that_torch_cannot_use(
        self, node: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def old() -> bool:
            warnings.warn("CUDA initialization: The driver is too old (found 11040).", stacklevel=1)
            return False

        def init() -> None:
            raise RuntimeError("The driver is too old (found 11040). Please update\nyour driver")

        def refusal(**env: str) -> str:
            node(LISTED, **env)
            monkeypatch.setattr(torch.accelerator, "is_available", old)
            with warnings.catch_warnings(record=True) as caught:
                device, note = devices.pick()
            assert (device, caught) == (devices.CPU, [])
            return note["mistake"]

        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        line = refusal()
        assert line.startswith(f"nvidia-smi shows 3 GPU(s), but torch {torch.__version__} can use")
        assert "none: The driver is too old (found 11040); install a driver and a torch" in line
        assert line.endswith("or use the CPU (CUDA_VISIBLE_DEVICES=-1)")
        assert "with CUDA_VISIBLE_DEVICES=7: The" in refusal(CUDA_VISIBLE_DEVICES="7")
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "it is built without CUDA; install a driver and a torch" in refusal()
        for says, env in (
            ("No devices were found", {}),
            (LISTED, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
            (None, {}),
        ):
            node(says, **env)
            assert devices.pick()[1]["mistake"] == ""


def note(gpu: str, host: str = "a", device: str = "cuda") -> dict[str, str]:
    return {"device": device, "gpu": gpu, "place": f"node-{host}", "mistake": ""}


class TestCheck:
    @pytest.mark.parametrize(
        "notes",
        [
            [note("1"), note("2"), note("1", "b"), note("2", "b")],
            [note(""), note("")],  # torch does not name them
            [note("", device="cpu"), note("", device="cpu")],
        ],
    )
    def test_each_its_own(self, notes: list) -> None:
        device = torch.device("cuda", 1)
        assert devices.check(notes, device, is_debugged=False) is device

    def test_shared(self, capsys: pytest.CaptureFixture) -> None:
        notes = [note("1"), note("1", "b"), note("2", "b"), note("1", "b")]
        line = "3 ranks on node-b but 2 GPU(s) for them: "
        with pytest.raises(UserError) as error:
            devices.check(notes, torch.device("cuda", 0), is_debugged=False)
        assert str(error.value).startswith(f"{line}start at most 2 (NPROC=2), give each rank")
        assert devices.check(notes, torch.device("cuda", 0), is_debugged=True) == devices.CPU
        assert capsys.readouterr().err == f"{line}debugging on the CPU\n"

    def test_a_mistake_of_one(self) -> None:
        wrong = {**note("", "b", "cpu"), "mistake": "no driver"}
        for notes in [note("1"), wrong], [wrong]:
            with pytest.raises(UserError, match=r"^node-b: no driver$"):
                devices.check(notes, devices.CPU, is_debugged=True)

    def test_different_kinds(self) -> None:
        notes = [note("1"), note("2"), note("", "b", "cpu")]
        with pytest.raises(UserError, match=r"rank 1 \(node-a\) on cuda, rank 2 \(node-b\) on cpu"):
            devices.check(notes, devices.CPU, is_debugged=True)

    @pytest.mark.parametrize(
        ("found", "name"), [({"uuid": "u", "pci_bus_id": 7}, "u 7 2"), ({}, "")]
    )
    def test_names(
        self, found: dict, name: str, node: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node(kind="xpu")
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: SimpleNamespace(**found))
        assert devices._name(torch.device("xpu", 2)).split() == name.split()
        assert devices._name(devices.CPU) == ""


def test_an_nvidia_smi_that_hangs(node: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    node(says="")
    tool = Path(os.environ["PATH"].split(":")[0]) / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(protocol, "NOTICE_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"has not answered in 0\.2 s.*restart this node"):
        environment.count_gpus()


class TestBackend:
    def test_backends(self, node: Callable) -> None:
        node()
        assert devices.backend(torch.device("cuda", 0)) == "nccl"
        assert devices.backend(devices.CPU) == "gloo"
        assert devices.backend(torch.device("xpu", 0)) == "xccl"
