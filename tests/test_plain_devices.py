"""Which device a rank takes, on machines that are only told of: GPUs of each kind, or none."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from engine.errors import UserError
from engine.ranks import devices, gpus, remedies

Env = dict[str, str]
UUIDS = ["GPU-ab1", "GPU-ab2", "GPU-c3"]
LISTED = "".join(f"GPU {n}: Some (UUID: {uuid})\n" for n, uuid in enumerate(UUIDS))
FAILS = "NVIDIA-SMI has failed because it couldn't communicate with the driver. Make sure that it"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this a node where nvidia-smi, if there is one, prints a text, and torch sees devices."""

    def node(says: str | None = None, kind: str = "cuda", seen: int = 0, **env: str) -> None:
        monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}:/bin", **env})
        monkeypatch.setattr(gpus, "DEVICES", [tmp_path / "device"])
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
            *(("0,1,-1,2", 2), ("0,,1", 1), ("1,7,0", 1), ("7", 0), ("0,0", 0), ("01,1", 0)),
            *(("GPU-ab1,GPU-c", 2), ("GPU-ab", 0), ("GPU-c3,GPU-x,GPU-ab1", 1), ("GPU-c,0", 1)),
            *(("MIG-1/2/3,MIG-4", 1), ("0,GPU-c3", 1)),
        ],
    )
    def test_as_cuda_does(
        self, text: str | None, count: int, node: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node(LISTED, **({} if text is None else {gpus.VARIABLE: text}))
        assert gpus.count() == count
        monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 3)
        monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
        found = torch.cuda._device_count_nvml()  # what torch makes of it; -1: it asks CUDA
        assert found == (-1 if text and text.startswith("MIG-") else count)

    def test_without_nvidia_smi(
        self, node: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Torch counts if there is a device, or if it is built for Intel's."""
        node(seen=5, CUDA_VISIBLE_DEVICES="0,2")
        assert gpus.count() == 2
        node(seen=5)
        assert gpus.count() == 0
        origin = str(tmp_path / "torch" / "__init__.py")
        monkeypatch.setattr(
            gpus.importlib.util, "find_spec", lambda _: SimpleNamespace(origin=origin)
        )
        (tmp_path / "torch" / "lib").mkdir(parents=True)
        assert gpus.count() == 0
        (tmp_path / "torch" / "lib" / "libtorch_xpu.so").touch()
        assert gpus.count() == 5
        (tmp_path / "device").touch()
        node(seen=4, CUDA_VISIBLE_DEVICES="")
        assert gpus.count() == 0


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
            ("mps", 1, {"WORLD_SIZE": "2"}, "mps"),
            ("mps", 1, {"RANK": "0", "WORLD_SIZE": "1"}, "mps"),
            ("mps", 1, {"RANK": "0", "WORLD_SIZE": "2"}, "cpu"),
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
        self, node: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
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
        assert "none: The driver is too old (found 11040); install" in line
        assert line.endswith("or use the CPU (CUDA_VISIBLE_DEVICES=-1)")
        with monkeypatch.context() as patch:
            patch.setattr(gpus, "by_nvidia_smi", asked := Mock(wraps=gpus.by_nvidia_smi))
            assert "CUDA_VISIBLE_DEVICES=7 names none of them" in refusal(CUDA_VISIBLE_DEVICES="7")
            asked.assert_called_once()  # it takes seconds
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "it is built without CUDA; install one with CUDA" in refusal()
        assert capsys.readouterr().out == ""
        with pytest.warns(UserWarning, match="too old"):  # torch's own words, without nvidia-smi
            node()
            monkeypatch.setattr(torch.accelerator, "is_available", old)
            assert devices.pick() == (devices.CPU, {"device": "cpu", "gpu": "", "mistake": ""})

    def test_no_gpu(self, node: Callable, capsys: pytest.CaptureFixture) -> None:
        """A node of a cluster without any, or a broken driver; silent where nobody asked."""
        for says, env, line in (
            (FAILS, {}, "couldn't communicate with the driver): computing on the CPU\n"),
            ("No devices were found", {}, "(No devices were found): computing on the CPU\n"),
            (FAILS, {"RANK": "1", "WORLD_SIZE": "2"}, ""),
            (FAILS, {"CUDA_VISIBLE_DEVICES": ""}, ""),
            (LISTED, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
            (None, {}, ""),
        ):
            node(says, **env)
            assert devices.pick() == (devices.CPU, {"device": "cpu", "gpu": "", "mistake": ""})
            out = capsys.readouterr().out
            assert out.endswith(line)
            assert out.count("\n") == bool(line)


def note(gpu: str, host: str = "a", device: str = "cuda") -> dict[str, str]:
    return {"device": device, "gpu": gpu, "host": host, "place": f"node-{host}", "mistake": ""}


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
        assert capsys.readouterr().out == f"{line}debugging on the CPU\n"

    def test_a_mistake_of_one(self) -> None:
        """It is named in all ranks, with its node if there are several."""
        wrong = {**note("", "b", "cpu"), "mistake": "no driver"}
        for notes, line in (
            ([note("1"), wrong], "node-b: no driver"),
            ([note("1", "b"), wrong], "no driver"),
            ([wrong], "no driver"),
        ):
            with pytest.raises(UserError, match=f"^{line}$"):
                devices.check(notes, devices.CPU, is_debugged=True)

    def test_different_kinds(self) -> None:
        notes = [note("1"), note("2"), note("", "b", "cpu")]
        with pytest.raises(UserError, match=r"rank 1 \(node-a\) on cuda, rank 2 \(node-b\) on cpu"):
            devices.check(notes, devices.CPU, is_debugged=True)

    @pytest.mark.parametrize(
        ("seen", "found", "name"),
        [
            (1, {"uuid": "u", "pci_bus_id": 7}, "u 7"),
            (4, {"uuid": "u"}, "u 2"),
            (4, {}, ""),
        ],
    )
    def test_names(
        self, seen: int, found: dict, name: str, node: Callable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Parts of a GPU may have all in common but the number."""
        node(kind="xpu", seen=seen)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: SimpleNamespace(**found))
        assert devices._name(torch.device("xpu", 2)).split() == name.split()
        assert devices._name(devices.CPU) == ""


def test_an_nvidia_smi_that_hangs(node: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    node(says="")
    tool = Path(os.environ["PATH"].split(":")[0]) / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(gpus, "SMI_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"has not answered in 0\.2 s.*restart this node"):
        gpus.count()


class TestBackend:
    def test_backends(self, node: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        node()
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        assert devices.backend(torch.device("cuda", 0)) == "nccl"
        assert devices.backend(devices.CPU) == devices.backend(torch.device("mps")) == "gloo"
        monkeypatch.setattr(dist, "is_xccl_available", lambda: True, raising=False)
        assert devices.backend(torch.device("xpu", 0)) == "xccl"
        monkeypatch.setattr(dist, "is_xccl_available", lambda: False, raising=False)
        with pytest.raises(UserError, match=r"has no xccl for xpu: use the CPU"):
            devices.backend(torch.device("xpu", 0))

    def test_a_group_that_exists(self, node: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        for kind, seen, backend, device in (
            *(("cuda", 4, "nccl", "cuda:3"), ("cuda", 4, "cpu:gloo,cuda:nccl", "cuda:3")),
            *(("xpu", 4, "xccl", "xpu:3"), ("cuda", 4, "gloo", "cpu"), ("mps", 1, "gloo", "cpu")),
            ("cuda", 0, "gloo", "cpu"),
        ):
            node(kind=kind, seen=seen)
            assert devices.current(backend) == torch.device(device)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("InvalidCxxCompiler: No working C++ compiler found in ('g++',)", "a C++ compiler (g++"),
        ("CppCompileError: fatal error: Python.h: No such file or directory", "a C++ compiler"),
        ("Failed to find C compiler. Please specify via CC environment variable", "a C compiler"),
        ("cuda_utils.c:6:10: fatal error: Python.h: No such file or directory", "a C compiler"),
    ],
)
def test_compilers(message: str, line: str) -> None:
    """What torch's inductor raises on CPUs, and Triton on GPUs, if one is missing."""
    found = remedies.explain(RuntimeError(message))
    assert f"--compile needs {line}" in found
    assert "this Python's headers" in found
