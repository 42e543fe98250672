"""What a person reads: links lead somewhere, commands and flags exist, pages say what is so."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pages
import pytest
import quoting
from generated import type_in_shell
from pages import ROOT, TASKS, TEMPLATE, rendered
from PIL import Image

import ddpkit

SITE = "https://org.github.io/ddp-template/"
SOURCE = "https://github.com/org/ddp-template/blob/main/"
FLAG = re.compile(r'add(?:_argument)?\(\s*"(--[a-z0-9-]+)"')


DOCUMENTS = {name: rest for name, *rest in pages.documents()}


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: of headings, and of names of ddpkit."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = (
        re.sub(r" {.*}|[^\w -]", "", found)
        for found in re.findall(r"^#+ (.*)$", prose, re.M)
    )
    slugs = (re.sub(r"[ -]+", "-", heading.strip().lower()) for heading in headings)
    return set(slugs).union(re.findall(r"^::: (.+)$", text, re.M))


def destination(link: str, folder: Path) -> Path | None:
    """Return the file that a link leads to; None: a page of somebody else's."""
    if link.startswith(SITE):
        page = ROOT / "docs" / link.removeprefix(SITE).rstrip("/")
        return page / "index.md" if page.is_dir() else page.with_name(page.name + ".md")
    if link.startswith(SOURCE):
        return ROOT / link.removeprefix(SOURCE)
    return None if re.match(r"https?:", link) else folder / link


def test_links() -> None:
    followed = 0
    for name, (folder, _, text) in DOCUMENTS.items():
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
        for url in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', prose):
            link, _, anchor = "".join(url).partition("#")
            path = destination(link, folder) if link else None
            assert path is None or path.exists(), f"{name}: {link}"
            followed += path is not None
            is_page = not path or path.suffix == ".md"
            if anchor and is_page and (path or not link):
                assert anchor in anchors(path.read_text() if path else text), (
                    f"{name}: #{anchor}"
                )
    assert followed > 50


def flags_of(script: str, task: str) -> set[str]:
    """Return the flags of main.py, predict.py or `ddpkit COMMAND`."""
    kit = ROOT / "ddpkit"
    folder = TEMPLATE / "tasks" / task
    files = {
        "main.py": (folder / "flags.py",),
        "predict.py": (folder / "predict.py",),
        "ddpkit where": (kit / "__main__.py",),
        "ddpkit convert": (kit / "convert/command.py",),
    }.get(script) or [
        kit / "vision/tools" / f"{name}.py"
        for name in ("arguments", script.split()[-1])
    ]
    text = "\n".join(file.read_text() for file in files)
    return {"--help", "--debug", "--debug-rank", *FLAG.findall(text)}


def commands(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield line, script and what follows it of each command for a project's scripts."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for i, word in enumerate(words):
                if word in ("./launch.sh", "main.py", "slurm/train.sbatch"):
                    yield line, "main.py", words[i + 1 :]
                elif word == "predict.py":
                    yield line, word, words[i + 1 :]
                elif words[i - 1 : i + 1] == ["-m", "ddpkit"]:
                    yield line, f"ddpkit {words[i + 1]}", words[i + 2 :]


def test_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    read = 0
    for name, (_, tasks, text) in DOCUMENTS.items():
        for line, script, words in commands(text):
            read += 1
            for task in [task for task in tasks if f"# {task}" in line] or tasks:
                for word in words:
                    known = not word.startswith("--") or word in flags_of(script, task)
                    file = TEMPLATE / "tasks" / task / word[1:]
                    exists = file.exists() or word[0] != "@"
                    assert known, f"{name}: {line}"
                    assert exists, f"{name}: {line}"
        for target in re.findall(r"^ *make (\w+)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), name
    assert read > 30


@pytest.mark.parametrize("task", TASKS)
def test_what_to_edit(task: str) -> None:
    """The files of the table exist, and have what it names."""
    table = rendered("README.md", task).split("## What to edit")[1].split("\n\n")[2]
    rows = re.findall(r"`(\w+\.py)`((?:, `\w+`)*)", table)
    assert len(rows) >= 3
    for file, names in rows:
        places = (TEMPLATE / file, TEMPLATE / "tasks" / task / file)
        (path,) = filter(Path.exists, places)
        for name in re.findall(r"\w+", names):
            defined = rf"^(def|class) {name}\b|^{name}\b.* ="
            assert re.search(defined, path.read_text(), re.M), name


def test_the_step_of_the_readme() -> None:
    """What it shows of main.py stands there, line by line, in this order."""
    (shown,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    text = (TEMPLATE / "main.py").read_text().replace("  # noqa: B007", "")
    lines = iter(text.splitlines())
    for line in shown.splitlines():
        assert any(line == other.removeprefix("    ") for other in lines), line


def test_resizing(tmp_path: Path) -> None:
    """The command in speed.md shrinks large images in place, in their folders and formats."""
    page = (ROOT / "docs/speed.md").read_text()
    section = page.partition("## If the CPU is too slow\n")[2].partition("\n## ")[0]
    block = section.split("```bash\n")[2].partition("```")[0]
    colours = np.random.default_rng(0).integers(0, 256, (300, 600, 3), np.uint8)
    image = Image.fromarray(colours)
    large = {
        "train/a b/rgb.png": image,
        "train/a b/palette.PNG": image.quantize(9),
        "val/c/grey.png": image.convert("L"),
        "val/c/alpha.webp": image.convert("RGBA"),
        "val/c/rgb.bmp": image,
    }
    small = tmp_path / "DIR/train/a b/small.png"
    small.parent.mkdir(parents=True)
    image.resize((600, 256)).save(small)
    before = small.read_bytes()
    exif = Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    for name, each in large.items():
        path = tmp_path / "DIR" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        each.save(path, exif=exif)
    type_in_shell(block, tmp_path)
    assert small.read_bytes() == before
    files = [path for path in (tmp_path / "DIR").rglob("*") if path.is_file()]
    assert len(files) == len(large) + 1
    for name in large:
        with Image.open(tmp_path / "DIR" / name) as shrunk:
            assert shrunk.size == (512, 256)
            assert name.endswith("bmp") or shrunk.getexif()[274] == 6


def test_length() -> None:
    """Of what people read first."""
    texts = [(TEMPLATE / "README.md").read_text()]
    texts += [rendered("README.md", task) for task in TASKS]
    shorter = "shorten it, or write on a page of docs/"
    assert (ROOT / "README.md").read_text().count("\n") <= 160, shorter
    assert max(text.count("\n") for text in texts) <= 200, shorter


def test_flags() -> None:
    assert pages.FLAGS.read_text() == pages.flags_page(), (
        f"to update: python {pages.__file__}"
    )


def test_names_of_ddpkit() -> None:
    """The pages describe each name of the door, once, and no other."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    text = "\n".join(path.read_text() for path in pages)
    named = re.findall(r"^::: ddpkit\.(\w+)$", text, re.M)
    assert sorted(named) == sorted(ddpkit.DOOR)
    listed = (ROOT / "docs" / "api" / "index.md").read_text()
    assert sorted(re.findall(r"\[`(\w+)`\]", listed)) == sorted(ddpkit.DOOR)


def test_list_of_pages() -> None:
    """llms.txt, for assistants, has a line on each page, in the order of the site."""
    lines = (ROOT / "docs" / "llms.txt").read_text().splitlines()
    listed = [line for line in lines if line.startswith("- ")]
    menu = (ROOT / "mkdocs.yml").read_text()
    names = re.findall(r"^ +- .*?([\w/-]+\.md)$", menu, re.M)
    for name, anchor in re.findall(r"^ +- .*: ([\w-]+)/#([\w-]+)$", menu, re.M):
        assert anchor in anchors((ROOT / "docs" / f"{name}.md").read_text())
    pages = [ROOT / "docs" / name for name in names]
    assert {*pages} == {*(ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(pages)
    for line, page in zip(listed, pages, strict=True):
        title, url = re.match(r"- \[(.+)\]\((.+/)\): \S", line).groups()
        assert page.read_text().startswith(f"# {title}\n")
        assert destination(url, ROOT) == page, line


def test_pages_that_quote_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`make pages`, which `make check` and `make test` run first, writes what is out of date."""
    page = pages.ROOT / "docs" / "flags.md"
    copy = tmp_path / page.name
    copy.write_text(f"{page.read_text()}old")
    monkeypatch.setattr(quoting, "PAGES", {copy: pages.flags_page})
    assert quoting.main() == 1
    assert "flags.md was out of date" in capsys.readouterr().out
    assert copy.read_text() == page.read_text()
    assert quoting.main() == 0
    makefile = (ROOT / "Makefile").read_text()
    assert {"test: pages", "check: pages"} <= set(makefile.splitlines())


# What people type into a search, and the page that is meant.
SOUGHT = """
common-edits: oversampling, lora, knowledge distillation, grad-cam, syncbatchnorm
recipes: class imbalance, hyperparameter search, early stopping, mixed precision, wandb
recipes: gradient accumulation, gradient clipping, learning rate schedule, data augmentation
recipes: batch size, out of memory, oom
virtual-ranks: reproducibility
fine-tuning: transfer learning, fine-tuning, finetune, freeze, backbone, pretrained weights
many-nodes: multi-node, multi-gpu, slurm, elastic
own-data: k-fold, stratified, custom dataset, multi-label, image size, greyscale, grayscale, leakage
library: conda, virtual environment, conflict
what-survives: checkpoint, resume, fault tolerance, preemption
output: tensorboard, confusion matrix, csv
poor-results: overfitting
export: onnx, quantization
unusual-images: multispectral, 16-bit
launchers: torchrun, kubernetes, docker, windows, jupyter
when-it-hangs: deadlock, nccl timeout
debugging: breakpoint, launch.json
labels: coco, yolo
tested: support matrix
api/index: api reference
speed: data loading
"""


# Words that a search finds in a sentence.
MENTIONED = """
fine-tuning: normalization, finetuning, proxy, hf_hub_offline
own-data: cross validation
when-it-hangs: address already in use, socket timeout, straggler
speed: channels_last, throughput, persistent_workers
output: random seed, visualize
launchers: rocm
recipes: weights & biases
labels: hdf5
library: git init, cite, deprecation
edits: pre-commit, git init
"""


def test_words_that_people_search_for() -> None:
    """Each is in a heading of its page, or in what comes before the first section."""
    missing = []
    for line in SOUGHT.strip().splitlines():
        page, _, words = line.partition(": ")
        text = (ROOT / "docs" / f"{page}.md").read_text().lower()
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        headings = re.findall(r"^#+ .*$", prose, re.M)
        seen = "\n".join([prose.split("\n## ")[0], *headings])
        missing += [(page, word) for word in words.split(", ") if word not in seen]
    for line in MENTIONED.strip().splitlines():
        page, _, words = line.partition(": ")
        text = (ROOT / "docs" / f"{page}.md").read_text().lower()
        missing += [(page, word) for word in words.split(", ") if word not in text]
    for task in TASKS:
        text = rendered("README.md", task)
        missing += [
            (task, word) for word in ("`git init`", "pre-commit") if word not in text
        ]
    assert not missing
