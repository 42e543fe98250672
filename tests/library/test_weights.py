"""--weights auto: published weights where they can be had; classic networks."""

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from generated import Done, Project, both_tasks, in_soak
from ports import free_port
from ranks import on_ranks, setup
from safetensors.torch import load_file, save_file

import ddpkit
from ddpkit.ranks import distributed
from ddpkit.vision import pretrained

USED = {
    "classification": "IMAGENET1K_V1",
    "segmentation": "imagenet",
    "timm": "r160_in1k",
}
# What has its weights at download.pytorch.org, and at huggingface.co.
NETWORK = {
    "classification": "--arch shufflenet_v2_x0_5",
    "segmentation": "--arch pspnet --encoder mobilenet_v2",
    "timm": "--arch timm/test_vit",
    "dinov3": "--arch timm/vit_small_patch16_dinov3",
    "dpt": "--image-size 64 --arch dpt --encoder tu-vit_small_patch16_dinov3",
}
INITIAL = """
import ddp, ddpkit, model, sys, torch
from ddpkit.ranks import failures
from flags import parse_args

with failures.one_line_errors():
    args = parse_args(sys.argv[2:])
    ddp.setup(args.local_rank, args)
    net = model.build_model(args, ["one", "two"], pretrained=args.weights)
    torch.save({"model": net.state_dict()}, f"{sys.argv[1]}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
"""


class Handler(BaseHTTPRequestHandler):
    """Answers as download.pytorch.org and huggingface.co do, or as `server.mode` says."""

    server: "Server"

    def do_HEAD(self) -> None:
        self.do_GET(False)

    def do_GET(self, with_body: bool = True) -> None:
        server = self.server
        revision, name = self.path.split("/")[-2:]
        server.requests.append(f"{self.command} {name}")
        path = server.folder / name
        if not path.exists():
            return self.send_error(404)
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", revision)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if with_body and server.mode == "half" and name != "config.json":
            self.wfile.write(content[: len(content) // 2])
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
        self.folder = folder
        self.mode = "whole"
        self.requests: list[str] = []
        self.is_over = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Downloads:
    """Ranks with --weights auto that download from a server on this machine."""

    def __init__(
        self,
        project: Project,
        server: Server,
        folder: Path,
        first: torch.Tensor,
        kind: str,
    ) -> None:
        self.project = project
        self.server = server
        self.folder = folder
        self.published = first  # weight of what the server has
        self.words = f"--image-size 32 {NETWORK[kind]}"
        self.name = next(
            path.name for path in server.folder.iterdir() if path.suffix != ".json"
        )
        self.cache = folder / "cache"
        self.port = server.server_port
        (folder / "initial.py").write_text(INITIAL)

    def patch(self) -> None:
        server = f"http://127.0.0.1:{self.port}"
        os.environ["TORCH_HOME"] = str(self.cache)
        pretrained.SECONDS = 1
        torchvision.models.WeightsEnum.url = property(lambda _: f"{server}/{self.name}")
        if self.name.endswith("safetensors"):
            from huggingface_hub import constants

            path = "/{repo_id}/resolve/{revision}/{filename}"
            constants.HUGGINGFACE_CO_URL_TEMPLATE = server + path
            constants.ENDPOINT = server
            constants.HF_HUB_CACHE = str(self.cache)
            constants.HF_HUB_OFFLINE = False

    def build(
        self, weights: str | None = None, on: int = 2
    ) -> tuple[Done, list[dict[str, Any]]]:
        """What ranks say that build the network, and what each begins with."""
        out = self.folder / "begun"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        script = self.folder / "initial.py"
        # Any folder will do; for the demo set nothing is downloaded.
        words = [out, "--data", self.folder]
        words += self.words.split()
        if weights:
            words += ["--weights", weights]
        done = self.project.run(words, on=on, script=script, patch=self.patch)
        paths = sorted(out.iterdir())
        return done, [torch.load(path, weights_only=True)["model"] for path in paths]

    def cached(self) -> list[Path]:
        """The files of weights that would be taken for whole."""
        return [
            path
            for path in self.cache.rglob("*")
            if path.name == self.name and path.exists()
        ]


@pytest.fixture
def downloads(
    project: Project, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Downloads]:
    kind = getattr(request, "param", project.task)
    folder = tmp_path / "published"
    folder.mkdir()
    torch.manual_seed(7)
    if kind == "timm":
        net = timm.create_model("test_vit")
    elif kind in ("dinov3", "dpt"):  # has no last layer
        net = timm.create_model("vit_small_patch16_dinov3", num_classes=0)
    elif kind == "classification":
        net = torchvision.models.get_model("shufflenet_v2_x0_5", num_classes=1000)
        torch.save(net.state_dict(), folder / "whole")
        digest = hashlib.sha256((folder / "whole").read_bytes()).hexdigest()
        (folder / "whole").rename(folder / f"net-{digest[:8]}.pth")
    else:
        net = smp.encoders.get_encoder("mobilenet_v2", weights=None)
    if kind != "classification":
        save_file(net.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    with Server(folder) as server:
        yield Downloads(project, server, tmp_path, next(net.parameters()), kind)
        server.is_over.set()
        server.shutdown()


def same(states: list[dict[str, Any]]) -> bool:
    first = states[0]
    return all(
        torch.equal(first[name], other[name]) for other in states[1:] for name in first
    )


@both_tasks
def test_published_weights(downloads: Downloads, few: Path, tmp_path: Path) -> None:
    """Downloaded by one rank, for all, and once: a resumed run and --eval-only need no network."""
    project = downloads.project
    server = downloads.server
    done, begun = downloads.build()
    assert (
        f"--weights auto: loading {USED[project.task]} (downloaded unless"
        in done.ok().out
    )
    assert (
        server.requests.count(f"GET {downloads.name}") == len(downloads.cached()) == 1
    )
    downloads.port = free_port()  # where nobody answers: it is cached
    _, again = downloads.build(on=1)
    _, scratch = downloads.build("none", on=1)
    assert same(begun + again)
    assert not same(begun + scratch)
    assert torch.equal(next(iter(begun[1].values())), downloads.published)

    out = tmp_path / "out"

    def train(words: str, on: int) -> str:
        more = f"{downloads.words} --weights auto {words}".split()
        return project.train(few, out, more, on=on, patch=downloads.patch).ok().out

    assert "--weights auto: " in train("", on=2)
    shutil.rmtree(downloads.cache)
    downloads.port = server.server_port
    server.requests.clear()
    for more in "--epochs 2", "--eval-only":
        assert "--weights" not in train(more, on=1)
    assert server.requests == []
    assert not downloads.cache.exists()


@pytest.mark.parametrize("downloads", ["timm"], indirect=True)
def test_timms_weights(downloads: Downloads) -> None:
    """All but those of the last layer; position embeddings are resampled for --image-size."""
    done, begun = downloads.build()
    said = done.ok().out
    assert f"--weights auto: loading {USED['timm']} (downloaded unless" in said
    new = r"tensors loaded, 9\S+ % of the model; new: head.weight, head.bias$"
    assert re.search(new, said.splitlines()[-1])
    assert same(begun)
    assert torch.equal(begun[0]["cls_token"], downloads.published)
    assert begun[0]["pos_embed"].shape[1] == 2 * 2 + 1
    downloads.port = free_port()
    shutil.rmtree(downloads.cache)
    done, begun = downloads.build()
    assert "download failed (" in done.ok().out
    assert same(begun)


@pytest.mark.parametrize(
    ("project", "downloads"),
    [("classification", "dinov3"), in_soak("segmentation", "dpt")],
    indirect=True,
)
def test_dinov3(downloads: Downloads, few: Path, tmp_path: Path) -> None:
    """The recipe: published weights, which stay while frozen; rates that fall with depth."""
    out = tmp_path / "out"
    words = f"{downloads.words} --weights auto --freeze-backbone 1 --layer-decay 0.75"
    train = downloads.project.train
    done = train(few, out, words.split(), on=1, patch=downloads.patch).ok()
    assert "from scratch" not in done.out, done.out
    assert "tensors loaded" in done.out
    state = torch.load(out / "last.pt", weights_only=True)
    published = load_file(downloads.server.folder / "model.safetensors")
    trained = state["model"]
    changed = []
    for name, weight in published.items():
        (found,) = [each for each in trained if each.endswith(name)]
        if not torch.equal(trained[found], weight):
            changed.append(name)
    assert len(published) > 100
    assert not changed
    rates = {group["initial_lr"] for group in state["optimizer"]["param_groups"]}
    if downloads.project.task == "classification":
        assert len(rates) == 14  # embedding, 12 blocks, and what is after them
        assert min(rates) == pytest.approx(0.001 * 0.75**13)
    else:
        assert sorted(rates) == pytest.approx([0.00075, 0.001])


@both_tasks
def test_weights_that_cannot_be_had(downloads: Downloads) -> None:
    """From scratch, with one line, to the bit as with --weights none; nothing broken is kept.

    If they are asked for, that is an error.
    """
    task = downloads.project.task
    server = downloads.server
    _, scratch = downloads.build("none", on=1)
    assert server.requests == []
    # huggingface_hub tries half a file again and again
    modes = ["closed", "half", "wrong"] if task == "classification" else ["closed"]
    for mode in modes:
        server.mode = mode
        downloads.port = free_port() if mode == "closed" else server.server_port
        began = time.monotonic()
        done, states = downloads.build(on=2 if mode == "closed" else 1)
        assert time.monotonic() - began < 30, mode
        lines = [line for line in done.ok().out.splitlines() if "from scratch" in line]
        assert len(lines) == 1
        assert lines[0].startswith(f"--weights {USED[task]}: download failed ("), lines
        assert same(scratch + states), mode
        assert downloads.cached() == []
    for weights in USED[task], "other":
        done, _ = downloads.build(weights)
        done.refused("", weights)


@on_ranks(2, group=False)
def test_a_download_may_take_longer_than_collectives() -> None:
    setup(timeout=2)

    def download(seconds: int) -> int:
        time.sleep(seconds)
        return seconds

    for seconds in 3, 0:
        assert distributed.await_rank_zero(download, seconds) == seconds


class Answer(Exception):
    def __init__(self, status: int) -> None:
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    ("error", "is_left_alone"),
    [
        (None, False),
        (Answer(404), False),
        (Answer(503), True),
        (OSError("no network"), True),
    ],
)
def test_a_hub_that_does_not_answer(
    error: Exception | None, is_left_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is left alone for this download alone; that a file is not there is an answer."""

    def ask(*_: object, **__: object) -> None:
        if error:
            raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ZeroDivisionError), pretrained.reaching_hub():
        assert is_left_alone == huggingface_hub.constants.HF_HUB_OFFLINE
        raise ZeroDivisionError
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_what_auto_stands_for() -> None:
    for arch, encoder, name in (
        ("unet", "resnet34", "imagenet"),
        ("unet", "resnext101_32x4d", "ssl"),
        ("fpn", "tu-resnet18.a1_in1k", "imagenet"),
        ("fpn", "tu-seresnet18", None),
        ("deeplabv3_resnet50", "resnet34", "COCO_WITH_VOC_LABELS_V1"),
    ):
        assert next(iter(pretrained.find_published(arch, encoder, {})), None) == name


# The smallest images that each takes without BatchNorm over a single pixel.
CLASSIFIERS = {
    "squeezenet1_1": 32,
    "googlenet": 64,
    "inception_v3": 96,
    "resnet50": 64,
    "densenet121": 64,
    "efficientnet_b0": 64,
    "convnext_tiny": 32,
    "swin_t": 32,
}
NETWORKS = [
    ("classification", f"--arch {name} --image-size {side}")
    for name, side in CLASSIFIERS.items()
]
NETWORKS += [
    ("segmentation", "--encoder vgg16 --image-size 32"),
    ("segmentation", "--encoder resnet34 --image-size 32"),
    ("segmentation", "--arch deeplabv3 --image-size 64"),
    ("segmentation", "--arch lraspp_mobilenet_v3_large --image-size 64"),
]


@pytest.mark.parametrize(("project", "network"), NETWORKS, indirect=["project"])
@on_ranks(1)
def test_classic_networks(project: Project, network: str) -> None:
    """The loss reaches each weight, and the last of layers() is what follows the backbone."""
    import model
    from flags import parse_args

    args = parse_args(f"--data demo {network}".split())
    classes = list("abcdef")
    side = args.image_size
    is_dense = project.task == "segmentation"
    net = model.build_model(args, classes)
    criterion = model.build_criterion(args, None, classes)
    targets = torch.randint(len(classes), (2, side, side) if is_dense else (2,))
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    for _ in range(2):  # the last layer of some is 0 at first
        logits = ddpkit.to_logits(net(torch.randn(2, 3, side, side)))
        criterion(logits, targets).backward()
        optimizer.step()
    gradients = [weight.grad for weight in net.parameters() if weight.requires_grad]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) / len(gradients) > 0.9
    others = [list(weight.shape) for weight in model.layers(net)[-1]]
    if is_dense:
        assert len(others) > 2  # decoder and head
    else:
        assert others[0][0] == 6  # the weight
        assert others[1:] in ([], [[6]])  # and the bias
