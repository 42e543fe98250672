"""Which device a rank takes, on machines that are only told of: GPUs of each kind, or none."""

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generated import refusal
from launcher import Launch
from ranks import draw_nothing

from ddpkit.ranks import devices, environment, protocol

LISTED = "".join(f"GPU {n}: Some (UUID: GPU-{n})\n" for n in range(3))
Node = Callable[..., None]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Make this a node where nvidia-smi, if there is one, prints a text, and torch sees devices."""

    def node(
        says: str | None = None, kind: str = "cuda", seen: int = 0, **env: str
    ) -> None:
        monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}:/bin", **env})
        monkeypatch.setattr(environment, "GPU_FILES", [])
        tool = tmp_path / "nvidia-smi"
        tool.unlink(missing_ok=True)
        if says is not None:
            tool.write_text(f"#!/bin/sh\n{says}\n")
            tool.chmod(0o755)
        found = {"is_available": seen > 0, "device_count": seen}
        for name, value in {**found, "current_accelerator": torch.device(kind)}.items():
            monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
        for module in (torch.cuda, torch.xpu):
            monkeypatch.setattr(
                module, "get_device_properties", lambda _: SimpleNamespace(uuid=7)
            )

    return node


@pytest.mark.parametrize(
    ("kind", "seen", "env", "device"),
    [
        ("cuda", 4, {}, "cuda:0"),
        ("cuda", 4, {"LOCAL_RANK": "3"}, "cuda:3"),
        # its own, of srun --gpus-per-task=1
        ("cuda", 1, {"LOCAL_RANK": "3"}, "cuda:0"),
        ("cuda", 2, {"LOCAL_RANK": "3"}, "cuda:1"),
        ("cuda", 4, {"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
        ("xpu", 4, {"LOCAL_RANK": "2"}, "xpu:2"),
        ("xpu", 4, {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ("mps", 1, {}, "mps:0"),
        ("mps", 1, {"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
        ("mps", 1, {"RANK": "0", "WORLD_SIZE": "1"}, "mps:0"),
        ("mps", 1, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "cpu"),
        ("cuda", 0, {}, "cpu"),
    ],
)
def test_devices(kind, seen, env, device, node):
    node(kind=kind, seen=seen, **env)
    found, note = devices.pick()
    assert found == torch.device(device)
    assert note["device"] == found.type
    assert not note["mistake"]
    has_name = found.type in ("cuda", "xpu")
    assert note["gpu"].split() == (["7", device[-1]] if has_name else [])
    backends = {
        "mps": "alone",
        "cpu": "gloo",
        "cuda": "cpu:gloo,cuda:nccl",
        "xpu": "cpu:gloo,xpu:xccl",
    }
    assert devices.backend(found) == backends[found.type]


def test_a_driver_that_torch_cannot_use(node, monkeypatch):
    """Its GPUs are there: the line has torch's reason; without any of them there is no line."""

    def is_available() -> None:
        warnings.warn("CUDA initialization: The driver is too old", stacklevel=1)

    def init() -> None:
        raise RuntimeError(
            "The driver is too old (found 11040). Please update\nyour driver"
        )

    def mistake(says: str | None, **env: str) -> str:
        node(says, **env)
        monkeypatch.setattr(torch.accelerator, "is_available", is_available)
        with warnings.catch_warnings(record=True) as caught:
            device, note = devices.pick()
        assert device == devices.CPU
        assert caught == []
        return note["mistake"]

    listed = f"echo '{LISTED}'"
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = mistake(listed)
    for words in (
        "3 GPU(s)",
        "driver is too old (found 11040);",
        "pytorch.org",
        devices.ON_CPU,
    ):
        assert words in line
    assert "CUDA_VISIBLE_DEVICES=7: The" in mistake(listed, CUDA_VISIBLE_DEVICES="7")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in mistake(listed)
    assert not mistake("echo No devices were found")
    assert not mistake(listed, CUDA_VISIBLE_DEVICES="NoDevFiles")
    assert not mistake(None)


def test_an_nvidia_smi_that_hangs(node, monkeypatch):
    node("exec sleep 20")
    monkeypatch.setattr(protocol, "NOTICE_SECONDS", 0.2)
    with refusal("environment.list_gpus", "0.2 s", "CUDA_VISIBLE_DEVICES="):
        environment.count_gpus()


def note(
    gpu: str, host: str = "a", device: str = "cuda", mistake: str = ""
) -> dict[str, Any]:
    return {"device": device, "gpu": gpu, "node": f"node-{host}", "mistake": mistake}


def test_each_its_own_gpu(capsys):
    device = torch.device("cuda", 1)
    cpu = note("", device="cpu")
    unnamed = [note(""), note("")]  # by torch
    for notes in (
        [note("1"), note("2"), note("1", "b"), note("2", "b")],
        unnamed,
        [cpu, cpu],
    ):
        assert devices.check(notes, device, is_debugged=False) is device
    shared = [
        note("1"),
        note("1", "b"),
        note("2", "b"),
        note("1", "b"),
    ]
    with refusal(
        "devices.check", "3 ranks on node-b", "2 GPU(s)", "NPROC=2", devices.ON_CPU
    ):
        devices.check(shared, device, is_debugged=False)
    assert devices.check(shared, device, is_debugged=True) == devices.CPU
    assert "3 ranks on node-b" in capsys.readouterr().err
    with refusal("devices.check", "node-b: no driver"):
        devices.check(
            [note("1"), note("", "b", "cpu", "no driver")], device, is_debugged=True
        )
    with refusal("devices.check", "rank 1 (node-a) on cuda", "rank 2 (node-b) on cpu"):
        devices.check(
            [note("1"), note("2"), note("", "b", "cpu")], device, is_debugged=True
        )


@pytest.mark.parametrize(
    ("name", "master", "others", "set_by_hand", "chosen"),
    [
        ("127.0.1.1", "10.0.0.1", ["10.0.0.2"], "", "eth1"),
        ("", "10.0.0.1", ["10.0.0.2"], "", "eth1"),
        # MASTER_ADDR is this host's name
        ("127.0.1.1", "127.0.1.1", ["10.0.0.2"], "", "eth1"),
        # two launchers on one machine
        ("127.0.1.1", "127.0.0.1", ["127.0.0.1"], "", None),
        ("127.0.1.1", "10.0.0.1", ["10.0.0.2"], "ib0", "ib0"),
        ("192.168.0.1", "10.0.0.1", ["10.0.0.2"], "", None),
    ],
)
def test_the_network_of_gloo(
    name,
    master,
    others,
    set_by_hand,
    chosen,
    node,
    monkeypatch,
):
    """That on which the ranks have met, if the host's name leads to itself as on Debian."""
    node(MASTER_ADDR=master, **({devices.NETWORK: set_by_hand} if set_by_hand else {}))
    addresses = {
        socket.gethostname(): name,
        master: "10.0.0.7" if master[:2] == "10" else master,
    }
    addresses |= {other: "10.0.0.7" if other[:2] == "10" else other for other in others}
    monkeypatch.setattr(devices, "address", addresses.get)
    monkeypatch.setattr(
        socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")]
    )
    of_names = {"lo": "127.0.0.1", "eth0": "192.168.0.1", "eth1": "10.0.0.7"}
    monkeypatch.setattr(devices, "_address_of", of_names.get)
    own = {"node": environment.node(), "address": addresses[master]}
    notes = [own]
    notes += [{"node": "other", "address": address} for address in others]
    devices.choose_network(notes)
    assert os.environ.get(devices.NETWORK) == chosen


def test_own_addresses():
    assert devices.address("127.0.0.1") == "127.0.0.1"
    assert devices.address("") == devices.address("a..b") == ""
    assert devices._address_of("lo") == "127.0.0.1"
    assert devices._address_of("none") == ""


def test_ranks_on_one_gpu(project, few, tmp_path):
    """All end with one line, before nccl would hang or fail; no folder is made."""

    def claim() -> None:
        devices.pick = lambda **_: (devices.CPU, note("1"))

    project.train(few, tmp_path / "out", patch=claim).refused(
        "devices.check", "2 ranks on"
    )
    assert not (tmp_path / "out").exists()


def test_launch_sh_with_gpus_that_torch_cannot_use(project, tmp_path):
    """No rank trains on the CPU unasked."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{LISTED}'\n")
    tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    words = ["--output-dir", tmp_path / "out"]
    said = tmp_path / "said"
    launched = Launch(project.folder, words, said, draw_nothing, NPROC="2", **env)
    launched.end().refused("devices.check", "nvidia-smi shows 3 GPU(s)", devices.ON_CPU)
    assert not (tmp_path / "out").exists()
