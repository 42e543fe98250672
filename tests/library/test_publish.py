"""python -m ddpkit publish, to a hub of our own."""

import base64
import json
import os
import re
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from generated import Done, Project, refusal
from huggingface_hub import ModelCard

from ddpkit.run import checkpoint
from ddpkit.vision.tools import publish

FILES: dict[str, bytes] = {}  # that were pushed


class Hub(BaseHTTPRequestHandler):
    """What create_repo and upload_folder ask for, without xet; best.pt goes by LFS."""

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        url = f"http://{self.headers['Host']}"
        answer = {}
        if self.headers["Authorization"] != "Bearer ours":
            return self.answer({}, 401)
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, content.splitlines()[1:]):
                path = line["value"]["path"]
                own = line["value"].get("content")
                FILES[path] = base64.b64decode(own) if own else FILES.pop(f"/{path}")
            answer = {"commitUrl": f"{url}/me/net/commit/1", "commitOid": "1"}
        elif self.path.endswith("/objects/batch"):
            answer = {"transfer": "basic", "objects": json.loads(content)["objects"]}
            answer["objects"][0]["actions"] = {"upload": {"href": f"{url}/best.pt"}}
        elif self.path.endswith("/preupload/main"):
            answer = {"files": json.loads(content)["files"]}
            for file in answer["files"]:
                file.update(
                    uploadMode=("regular", "lfs")["pt" in file["path"]],
                    shouldIgnore=False,
                )
        self.answer(answer or {"url": f"{url}/me/net"})

    def do_PUT(self) -> None:
        FILES[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})

    def answer(self, value: object, status: int = 200) -> None:
        self.send_response_only(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


def test_push(project: Project, trained: Path, data: Path, tmp_path: Path) -> None:
    """All files without paths of here; one line without a login, a wrong one, without a network.

    The copy of the checkpoint predicts, and can be resumed.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hub.server_address[1]}"
        env = {
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        words = (
            "--repo",
            "me/net",
            "--checkpoint",
            trained / "best.pt",
            "--output",
            tmp_path,
        )

        def push(token: str) -> Done:
            def patch() -> None:
                os.environ |= {"HF_ENDPOINT": url, "HF_TOKEN": token, **env}
                for name in [name for name in sys.modules if "huggingface_hub" in name]:
                    del sys.modules[name]  # it reads them as it is imported

            return project.run(words, script="ddpkit publish", on=1, patch=patch)

        assert f"published: {url}/me/net\n" in push("ours").ok().out
        push("").refused("publish.push", "hf auth login")
        push("other").refused("publish.push", "401")
        hub.shutdown()
    push("ours").refused("publish.push", "refused")
    for name in "metrics.csv", "per_class.csv", "examples.png":
        assert FILES[name] == (trained / name).read_bytes()
    places = [
        str(place).encode() for place in (trained.parent, project.folder, Path.home())
    ]
    assert places[0] in (trained / "args.json").read_bytes()
    for name, content in FILES.items():
        assert not [place for place in places if place in content], name
    (tmp_path / "copy.pt").write_bytes(FILES["best.pt"])
    copy = checkpoint.read(tmp_path / "copy.pt")
    own = checkpoint.read(trained / "best.pt")
    assert copy["args"]["data"] == Path(own["args"]["data"]).name
    for name in own.keys() - {"args", "path", "resumed_from"}:
        assert str(copy[name]) == str(own[name])
    words = "--checkpoint", tmp_path / "copy.pt", "--output", tmp_path / "predicted"
    done = project.run(data / "val", words, script="predict.py", on=1).ok()
    assert done.out.startswith(f"model and flags are those of {words[1]}\n")
    assert "23 of 23" in done.out
    resumed = tmp_path / "resumed"
    done = project.train(data, resumed, "--resume", tmp_path / "copy.pt").ok()
    assert "copy.pt: 1 of 1 epochs done" in done.out
    card = ModelCard(FILES["README.md"].decode())
    last = card.data.eval_results[-1]
    assert (
        f"\n- {publish.as_text(last.metric_type)}: {last.metric_value:.4g}\n"
        in card.text
    )
    assert card.data.pipeline_tag == card.data.eval_results[0].task_type
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.model_name == "me/net" and card.data.license == "unknown"
    assert card.data.eval_results[0].dataset_name == "set"
    assert "./launch.sh --data set --arch shufflenet_v2_x0_5 " in card.text


def test_what_others_may_have_made(
    project: Project, trained: Path, tmp_path: Path
) -> None:
    """Links to files of one's own are not published; what a stranger names is text in the card."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    words = ["--checkpoint", str(run / "best.pt"), "--output", str(tmp_path / "hub")]
    best = tmp_path / "best.pt"
    shutil.copyfile(run / "best.pt", best)

    def check() -> None:
        for name, origin in (
            *[(name, secret) for name in ("curves.png", "per_class.csv", "args.json")],
            ("best.pt", best),
        ):
            path = run / name
            path.rename(tmp_path / "kept")
            for link in path.symlink_to, path.hardlink_to:
                link(origin)
                with refusal("publish.read_own", path, "it may be someone else's"):
                    publish.main(words)
                path.unlink()
            (tmp_path / "kept").rename(path)
        assert not (tmp_path / "hub").exists()
        state = torch.load(best, weights_only=True)
        state["args"]["arch"] = "x`\n\n<img src=x onerror=alert(1)>"
        torch.save(state, run / "best.pt")
        facts = json.loads((run / "args.json").read_text())
        (run / "args.json").write_text(json.dumps(facts | {"device": "<b>"}))
        publish.main(words)

    project.here(check).ok()
    card = (tmp_path / "hub/README.md").read_text()
    assert "\nx\\`\\\\n\\\\n\\<img src=x onerror=alert(1)\\> for image-" in card
    assert " on \\<b\\> with" in card
    assert not re.search(r"^ {0,3}<", card, re.M)
    for content in "3", "[" * 10**5:
        (run / "args.json").write_text(content)
        project.run(words, script="ddpkit publish", on=1).refused(
            "files.parse", "args.json", "not JSON"
        )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/me/my set/", "my set"),
        ("1.0.0 in /opt/a b/ddpkit", "1.0.0 in ddpkit"),
        ("~/set", "set"),
        ("../them/set", "set"),
        ("C:\\Users\\me\\set", "set"),
        ("timm/vit", "timm/vit"),
        ("runs/default", "runs/default"),
        ("2/5", "2/5"),
        ("auto", "auto"),
        ("0.1", "0.1"),
    ],
)
def test_paths(text: str, shown: str) -> None:
    assert publish.without_paths({"a": [text, 3]}) == {"a": [shown, 3]}
