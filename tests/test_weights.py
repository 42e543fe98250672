"""--weights auto: published weights where they can be had; recipes; classic networks."""

import hashlib
import math
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from running import NETS, SAME_FOR_BOTH, SCRIPTS, SMALL, Project, flags
from safetensors.torch import load_file

USED = {"classification": "IMAGENET1K_V1", "segmentation": "imagenet"}
ENCODER = {"classification": None, "segmentation": "mobilenet_v2"}
# What has its weights at download.pytorch.org, and at huggingface.co.
NETWORK = {
    "classification": NETS["classification"],
    "segmentation": ("--arch", "pspnet", "--encoder", "mobilenet_v2"),
}


class Handler(BaseHTTPRequestHandler):
    """Answers as download.pytorch.org and huggingface.co do, or as `server.mode` says."""

    server: "Server"

    def do_HEAD(self) -> None:
        self.do_GET(False)

    def do_GET(self, with_body: bool = True) -> None:
        server, (*_, revision, name) = self.server, self.path.split("/")
        server.requests.append(f"{self.command} {name}")
        path = server.folder / name
        if server.mode == "missing" or not path.exists():
            return self.send_error(404)
        if server.mode == "silent":
            server.is_over.wait()
            return None
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", revision)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if with_body and server.mode == "half" and name != "config.json":
            self.wfile.write(content[: len(content) // 2])
            server.mark.touch()
            server.is_over.wait()
        elif with_body:
            self.wfile.write(bytes(len(content)) if server.mode == "wrong" else content)
        return None

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.mark = folder, folder / "half"
        self.mode, self.requests, self.is_over = "whole", [], threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def server(project: Project, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "published").mkdir()
    project.call("weights.publish", tmp_path / "published", ENCODER[project.task])
    with Server(tmp_path / "published") as server:
        yield server
        server.is_over.set()
        server.shutdown()


class Downloads:
    """Ranks with --weights auto that download from `server`."""

    def __init__(self, project: Project, data: Path, server: Server, folder: Path) -> None:
        self.project, self.server, self.folder = project, server, folder
        small = (word for word in SMALL if word not in ("--weights", "none"))
        self.words = [*small, "--image-size", 32, *NETWORK[project.task], "--data", data]
        self.name = next(path.name for path in server.folder.iterdir() if path.suffix != ".json")
        self.cache = folder / "cache"
        self.order = [server.server_port, self.name, self.cache]

    def build(self, *more: object, port: int = 0) -> tuple[list, list[dict[str, Any]]]:
        """What two ranks say, and the network that each begins with."""
        out = self.folder / "initial"
        shutil.rmtree(out, ignore_errors=True)
        order = [port or self.server.server_port, *self.order[1:]]
        words = [SCRIPTS / "initial.py", self.folder / "said", out, *self.words, *more]
        said = self.project.call("weights.ranks", order, *words)
        return said, [torch.load(path, weights_only=True) for path in sorted(out.glob("*.pt"))]

    def train(self, out: Path, *more: object) -> tuple[list, dict[str, Any]]:
        """What two ranks say, and their last checkpoint."""
        words = ["main.py", self.folder / "said", *self.words, "--output-dir", out, *more]
        said = self.project.call("weights.ranks", self.order, *words)
        assert said[0] == [0, 0], said
        return said[1], torch.load(out / "last.pt", weights_only=True)

    def cached(self) -> list[Path]:
        """The files of weights that would be taken for whole."""
        return [path for path in self.cache.rglob("*") if path.name == self.name and path.exists()]

    def published(self) -> torch.Tensor:
        """The first weight of what the server publishes."""
        path = self.server.folder / self.name
        is_pickle = path.suffix == ".pth"
        state = torch.load(path, weights_only=True) if is_pickle else load_file(path)
        return state["conv1.0.weight" if is_pickle else "features.0.0.weight"]


@pytest.fixture
def few(project: Project, tmp_path: Path) -> Path:
    """A step's images."""
    return project.draw(tmp_path / "few", 12, 6)


@pytest.fixture
def downloads(project: Project, few: Path, server: Server, tmp_path: Path) -> Downloads:
    return Downloads(project, few, server, tmp_path)


def same(*states: dict[str, Any]) -> bool:
    first, *others = (state["model"] for state in states)
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def first(state: dict[str, Any]) -> torch.Tensor:
    """A network's first weight."""
    return next(iter(state["model"].values()))


def test_published_weights(downloads: Downloads) -> None:
    """Downloaded by one rank, for all, and once: a resumed run and --eval-only need no network."""
    task, server = downloads.project.task, downloads.server
    said, begun = downloads.build()
    assert said[0] == [0, 0], said
    assert f"--weights auto: {USED[task]}, downloaded unless cached" in said[1]
    assert "tensors loaded; new: " in said[1]
    assert server.requests.count(f"GET {downloads.name}") == 1
    assert len(downloads.cached()) == 1
    said, again = downloads.build(port=free_port())  # cached
    assert same(*begun, *again)
    _, scratch = downloads.build("--weights", "none")
    assert not same(*begun, *scratch)
    assert torch.equal(first(begun[1]), downloads.published())

    server.requests.clear()
    out = downloads.folder / "out"
    said, _ = downloads.train(out)
    assert f"--weights auto: {USED[task]}" in said
    shutil.rmtree(downloads.cache)
    server.requests.clear()
    said, _ = downloads.train(out, "--epochs", 2)
    assert "--weights" not in said
    downloads.train(out, "--eval-only")
    assert server.requests == []
    assert not downloads.cache.exists()


def test_weights_that_cannot_be_had(downloads: Downloads) -> None:
    """From scratch, with one line, to the bit as with --weights none; nothing broken is kept."""
    task, server = downloads.project.task, downloads.server
    said, scratch = downloads.build("--weights", "none")
    assert said[1] == said[2] == ""
    assert server.requests == []
    modes = ["closed", "silent", "half", "wrong", "missing", "no folder"]
    if task == "segmentation":  # of huggingface_hub, which tries half a file again and again
        modes = [mode for mode in modes if mode not in ("half", "wrong")]
    for mode in modes:
        server.mode = mode
        if mode == "no folder":
            shutil.rmtree(downloads.cache, ignore_errors=True)
            downloads.cache.touch()
        began = time.monotonic()
        said, states = downloads.build(port=free_port() if mode == "closed" else 0)
        assert time.monotonic() - began < 30, mode
        assert said[0] == [0, 0], said
        lines = [line for line in said[1].splitlines() if "from scratch" in line]
        assert len(lines) == 1, said
        assert lines[0].startswith(f"--weights {USED[task]}: download failed ("), lines
        assert lines[0].endswith("; starts from scratch; use --weights FILE, or --weights none")
        assert same(*scratch, *states), mode
        assert downloads.cached() == []


@SAME_FOR_BOTH
def test_a_download_may_take_longer_than_collectives(project: Project) -> None:
    project.fork(script=SCRIPTS / "slow_rank_zero.py").ok()


def test_a_kill_while_downloading(downloads: Downloads) -> None:
    server, project = downloads.server, downloads.project
    server.mode = "half"
    words = [SCRIPTS / "initial.py", server.mark, downloads.folder / "out", *downloads.words]
    assert project.call("weights.killed", downloads.order, *words) == [-9]
    assert any(path.is_file() for path in downloads.cache.rglob("*"))
    assert downloads.cached() == []
    server.mode = "whole"
    _, states = downloads.build()
    assert torch.equal(first(states[0]), downloads.published())


def test_weights_that_are_asked_for(downloads: Downloads) -> None:
    """An error, in one line, where auto starts from scratch."""
    name = USED[downloads.project.task]
    for weights, words in (
        (name, f"--weights {name}: download failed ("),
        ("other", "--weights other: "),
        ("none.pt", "none.pt: cannot be read (No such file"),
    ):
        (statuses, _, err), _ = downloads.build("--weights", weights, port=free_port())
        assert 2 in statuses
        assert err.startswith(f"error: {words}")
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("project", ["segmentation"], indirect=True)
def test_what_auto_stands_for(project: Project) -> None:
    names = {
        ("unet", "resnet34"): "imagenet",
        ("unet", "resnext101_32x4d"): "ssl",
        ("unet", "dpn68b"): "imagenet+5k",
        ("fpn", "tu-resnet18.a1_in1k"): "imagenet",
        ("fpn", "tu-seresnet18"): None,
        ("deeplabv3_resnet50", "resnet34"): "COCO_WITH_VOC_LABELS_V1",
    }
    assert project.call("weights.published", [*names]) == [*names.values()]


# The smallest images that each takes without BatchNorm over a single pixel.
CLASSIFIERS = {
    **{"alexnet": 64, "vgg16_bn": 32, "squeezenet1_1": 32, "googlenet": 64},
    **{"inception_v3": 96, "resnet50": 64, "resnext50_32x4d": 64, "densenet121": 64},
    **{"shufflenet_v2_x1_0": 64, "mobilenet_v2": 64, "mobilenet_v3_large": 64, "mnasnet1_0": 64},
    **{"efficientnet_b0": 64, "regnet_y_400mf": 64, "convnext_tiny": 32, "vit_b_16": 32},
    **{"swin_t": 32, "maxvit_t": 224},
}
SEGMENTERS = [
    *(f"--encoder {name} --image-size 32" for name in ("vgg16", "resnet34", "resnet101")),
    "--arch deeplabv3 --encoder resnet50 --image-size 32",
]


def test_classic_networks(project: Project, few: Path) -> None:
    """Each learns from the demo set, and backbone() leaves out what follows the backbone."""
    networks = SEGMENTERS
    if project.task == "classification":
        networks = [f"--arch {name} --image-size {CLASSIFIERS[name]}" for name in CLASSIFIERS]
    found = project.call("networks.first_steps", few, *networks)
    for network, result in zip(networks, found, strict=True):
        assert math.isfinite(result["loss"]), network
        assert result["changed"] > 0.9, (network, result)
        if project.task == "classification":
            weight, *bias = result["others"]
            assert [weight[0], *bias] in ([6], [6, [6]]), (network, result)
        else:
            assert len(result["others"]) > 2, network  # decoder and head


RECIPES = {
    "classification": {"finetune.txt", "imagenet_resnet50.txt"},
    "segmentation": {"cracks_unet.txt", "voc_deeplabv3.txt"},
}
# What makes an epoch short, with small networks.
SHORT = ("--epochs", "1", "--batch-size", "2", "--weights", "none")


def test_recipes(project: Project, few: Path, tmp_path: Path) -> None:
    """Each says that it was not run, whence its figure comes, and how to start it; and it runs."""
    folder = project.folder / "recipes"
    assert {path.name for path in folder.iterdir()} == RECIPES[project.task]
    for path in sorted(folder.iterdir()):
        lines = path.read_text().splitlines()
        comment = "\n".join(line for line in lines if line.startswith("#"))
        assert f"./launch.sh @recipes/{path.name} --data DIR" in comment
        assert "Not run here" in comment
        assert "https://" in comment
        assert max(map(len, lines)) <= 100
        words = [f"@{path}", *flags(few, tmp_path / path.stem), *SHORT]
        project.alone(*words, *NETS[project.task], draws=False).ok()


def test_what_recipes_promise(project: Project) -> None:
    """The numbers of their comments, from the flags."""
    words = [f"@{path}" for path in sorted((project.folder / "recipes").iterdir())]
    first, second = (project.call("networks.flags", word) for word in words)
    if project.task == "classification":
        assert second["arch"] == "resnet50"
        assert (second["lr"], 8 * second["batch_size"]) == (0.1, 256)
        rates = project.call("networks.rates", words[1], 2)
        assert [rates[2 * epoch] for epoch in (0, 29, 30, 60, 89)] == pytest.approx(
            [0.1, 0.1, 0.01, 0.001, 0.001]
        )
        assert first["weights"] == "DEFAULT"
    else:
        assert 4 * second["batch_size"] == 16
        steps = 10582 // 16
        assert second["epochs"] * steps == 19830
        rates = project.call("networks.rates", words[1], steps)
        assert rates[0] == 0.01
        assert rates[steps * 15] == pytest.approx(0.01 * 0.5**0.9)
        assert (first["arch"], first["encoder"]) == ("unet", "resnet34")
