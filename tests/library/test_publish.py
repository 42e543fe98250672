"""python -m ddpkit publish, to a hub of our own."""

import base64
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from generated import Done, Project
from huggingface_hub import ModelCard

FILES: dict[str, bytes] = {}  # that were pushed


class Hub(BaseHTTPRequestHandler):
    """What create_repo and upload_folder ask for, without xet; best.pt goes by LFS."""

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        url, answer = f"http://{self.headers['Host']}", {}
        if self.headers["Authorization"] != "Bearer ours":
            return self.answer({}, 401)
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, content.splitlines()[1:]):
                path, own = line["value"]["path"], line["value"].get("content")
                FILES[path] = base64.b64decode(own) if own else FILES.pop(f"/{path}")
            answer = {"commitUrl": f"{url}/me/net/commit/1", "commitOid": "1"}
        elif self.path.endswith("/objects/batch"):
            answer = {"transfer": "basic", "objects": json.loads(content)["objects"]}
            answer["objects"][0]["actions"] = {"upload": {"href": f"{url}/best.pt"}}
        elif self.path.endswith("/preupload/main"):
            answer = {"files": json.loads(content)["files"]}
            for file in answer["files"]:
                file.update(uploadMode=("regular", "lfs")["pt" in file["path"]], shouldIgnore=False)
        self.answer(answer or {"url": f"{url}/me/net"})

    def do_PUT(self) -> None:
        FILES[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})

    def answer(self, value: object, status: int = 200) -> None:
        self.send_response_only(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


def test_push(project: Project, trained: Path, tmp_path: Path) -> None:
    """All files as they are; one line without a login, with a wrong one, without a network."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hub.server_address[1]}"
        env = {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        words = "--repo", "me/net", "--checkpoint", trained / "best.pt", "--output", tmp_path

        def push(token: str) -> Done:
            def patch() -> None:
                os.environ |= {"HF_ENDPOINT": url, "HF_TOKEN": token, **env}
                for name in [name for name in sys.modules if "huggingface_hub" in name]:
                    del sys.modules[name]  # it reads them as it is imported

            return project.run(*words, script="ddpkit publish", on=1, patch=patch)

        assert f"published: {url}/me/net\n" in push("ours").ok().out
        push("").refused("publish.push", "hf auth login")
        push("other").refused("publish.push", "401")
        hub.shutdown()
    push("ours").refused("publish.push", "refused")
    for name in "best.pt", "metrics.csv", "args.json", "per_class.csv", "examples.png":
        assert FILES[name] == (trained / name).read_bytes()
    card = ModelCard(FILES["README.md"].decode())
    assert f"| {card.data.eval_results[-1].metric_value:.4g} |" in card.text
    assert card.data.pipeline_tag == "image-classification"
    assert "./launch.sh --data set --arch shufflenet_v2_x0_5 " in card.text
