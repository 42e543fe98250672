"""Publish a network on the Hugging Face hub: python -m ddpkit publish --repo USER/NAME

arguments.py says what it does and takes.
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpkit import files
from ddpkit.errors import UserError, escape, reason_of
from ddpkit.ranks import process
from ddpkit.run import checkpoint
from ddpkit.run.file_names import SHOWN
from ddpkit.run.states import State
from ddpkit.vision.rows import OF_TUNING, only_numbers, recorded_rows
from ddpkit.vision.tools import arguments

NEEDED = ["args.json", "metrics.csv"]
# A path that begins at the root, at home or above, with all that follows: it may have
# blanks.
PATH = re.compile(r"(?<![\w.~/\\-])(?:~[\w.-]*|\.\.|[A-Za-z]:)?[/\\].*", re.S)
MARKUP = re.compile(r"[\\`*_{}\[\]<>|~&$!#]")  # of Markdown


def main(argv: Sequence[str] | None = None) -> None:
    given = arguments.PUBLISH.parse_args(argv)
    path = given.checkpoint
    for needed in map(path.with_name, NEEDED):
        if not needed.is_file():
            raise UserError(f"{needed}: no such file; give a checkpoint of a run")
    read_own(path, 0)
    contents = {}
    # worst.csv has paths of this machine
    for name in {*NEEDED, *SHOWN} - {"worst.csv"}:
        if path.with_name(name).is_file():
            contents[name] = read_own(path.with_name(name))
    if given.output.resolve() == path.parent.resolve():
        raise UserError(
            f"--output {given.output} is the run's own folder: give another one"
        )
    state = checkpoint.read(path)
    del state["path"]  # where it was read from, which is no part of it
    for name in ("args", "resumed_from"):
        if name in state:
            state[name] = without_paths(state[name])
    about = without_paths(files.parse(path.with_name("args.json"), to_dict, "JSON"))
    title = given.repo or process.project().name
    # before anything is written, because it may find a fault
    card = make_card(path, state, about, title, given.license, contents)
    contents["args.json"] = json.dumps(about, indent=2).encode()
    contents["README.md"] = card.encode()
    with files.writing(given.output / path.name, parents=True) as tmp_path:
        checkpoint.write_file(tmp_path, state)
    for name, content in contents.items():
        with files.writing(given.output / name) as tmp_path:
            tmp_path.write_bytes(content)
    names = [path.name, *sorted(contents)]
    print(f"written to {given.output}: {', '.join(names)}")
    if given.repo:
        url = push(given.output, names, given.repo, given.private)
        print(f"published: {url}")


def read_own(path: Path, most: int = -1) -> bytes:
    """Return the first bytes of a run's file; a UserError if others may have put it there."""
    try:
        with files.open_file(path, sys.maxsize, is_own=True) as file:
            return file.read(most)
    except OSError as error:
        raise UserError(
            f"{path}: not published ({error.strerror}): it may be someone else's; inspect it, then "
            "replace it with a copy"
        ) from None


def to_dict(content: bytes) -> dict[str, object]:
    return dict(json.loads(content))


def without_paths(value: object) -> Any:
    """Return `value` with the last names of paths: "1.0 in /data/me/set" is "1.0 in set"."""

    def last_name(found: re.Match) -> str:
        return re.split(r"[/\\]", found[0].rstrip("/\\"))[-1]

    if isinstance(value, dict):
        return {key: without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_paths, value))
    return PATH.sub(last_name, value) if isinstance(value, str) else value


def make_card(
    path: Path,
    state: State,
    about: Mapping[str, object],
    title: str,
    license: str,
    contents: Mapping[str, bytes],
) -> str:
    """Return the model card of the checkpoint at `path`. contents: of files beside it, by name."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    used = state["args"]
    data = Path(str(used.get("data") or "demo")).name
    kind = "segmentation" if process.own("model").STRIDE else "classification"
    task = f"image-{kind}"
    rows = recorded_rows(path.parent)
    if not rows:
        raise UserError(f"{path.parent}: no epoch in metrics.csv; train first")
    # of the checkpoint's epoch; a run that goes on may have written more since
    own = next((row for row in rows if row["epoch"] == state["epoch"]), rows[-1])
    results = []
    metrics = []
    for name, value in only_numbers(own).items():
        # else not measured in that epoch
        if name not in OF_TUNING and not math.isnan(value):
            results.append(EvalResult(task, data, data, name, value))
            metrics.append(f"- {as_text(name)}: {value:.4g}")
    listed = "\n".join(metrics)
    facts = ModelCardData(
        license=license,
        library_name="pytorch",
        pipeline_tag=task,
        tags=["ddpkit", "pytorch"],
        model_name=title,
        eval_results=results,
    )
    command = escape(f"./launch.sh {shlex.join(used_flags(used))}")
    pictures = [name for name in sorted(contents) if name.endswith(".png")]
    images = "\n".join(f"![{name}]({name})" for name in pictures)
    arch, ranks, device, where = [
        as_text(each)
        for each in (used.get("arch"), about.get("ranks"), about.get("device"), data)
    ]
    card = ModelCard(f"""---
{facts}
---
# {title}

{arch} for {task} with {len(state["classes"])} classes, trained on {where} by
{ranks} rank(s) on {device} with

    {command}

`args.json` has all flags and versions, and the commit of the project.
Metrics after epoch {own["epoch"]}:

{listed}

## Use

In the project that trained it, `python predict.py FILES --checkpoint {path.name}`, or:

    import ddpkit, flags, model, torch
    parts = model.build_model, flags.parse_args, torch.device("cpu")
    net, *_ = ddpkit.open_model("{path.name}", *parts)
    logits = net(images)  # float32 (N, {state["channels"]}, H, W), normalised

{images}
""")
    return str(card)


def used_flags(used: dict[str, object]) -> list[str]:
    """Return the words of the flags that are not as by default, but for where the run was."""
    words = []
    given = {}
    if used.get("data"):
        given = {"data": Path(str(used["data"])).name}
        words = ["--data", given["data"]]
    defaults = vars(process.own("flags").parse_args([], given))
    for name, value in used.items():
        if name in ("data", "output_dir"):
            continue
        if value != defaults.get(name, value):  # newer flags may lack it
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:  # such as --deterministic, which takes no value
                words.append(str(value))
    return words


def as_text(value: object) -> str:
    """Return what Markdown shows as `value`, in one line."""
    return MARKUP.sub(r"\\\g<0>", escape(value))


def push(folder: Path, names: Sequence[str], repo: str, is_private: bool) -> str:
    """Push the files `names` in `folder` to the hub; return where they are. Raises a UserError."""
    import huggingface_hub

    if not huggingface_hub.get_token():
        raise UserError(
            f"{repo}: not logged in to the hub; run: hf auth login, or set HF_TOKEN"
        )
    try:
        hub = huggingface_hub.HfApi()
        # None leaves it to the hub: public, unless the organisation's default is private
        url = hub.create_repo(repo, private=is_private or None, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=list(names))
    except Exception as error:  # of many types
        reason = reason_of(error, 300)
        raise UserError(f"{repo}: not published ({reason})") from None
    return str(url)
