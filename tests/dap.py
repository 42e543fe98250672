"""What VS Code does when F5 is pressed, in the Debug Adapter Protocol, for tests.

It reads .vscode/launch.json, fills in variables, starts the adapter, runs the program in a terminal
of its own, and opens one more session for each process that the adapter tells of. Tasks, too.
https://microsoft.github.io/debug-adapter-protocol/specification
"""

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import marked

PATIENCE = 120  # seconds; a safety net
Breakpoints = dict[str, list[dict[str, Any]]]  # file -> [{"line": 7, "condition": "rank == 1"}]


def parse(text: str) -> Any:
    """JSON with // comments and trailing commas, as VS Code reads it."""
    string = r'"(?:\\.|[^"\\])*"'
    text = re.sub(rf"({string})|//[^\n]*", lambda m: m[1] or "", text)
    return json.loads(re.sub(rf"({string})|,(?=\s*[\]}}])", lambda m: m[1] or "", text))


def read(folder: Path, name: str) -> Any:
    return parse((folder / ".vscode" / name).read_text())


def fill_in(value: Any, variables: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: fill_in(part, variables) for key, part in value.items()}
    if isinstance(value, list):
        return [fill_in(part, variables) for part in value]
    if isinstance(value, str):
        return re.sub(r"\$\{(.+?)\}", lambda m: variables[m[1]], value)
    return value


def answered(project: Path, questions: list[dict[str, str]], answers: dict[str, str]) -> Any:
    """What VS Code puts in place of variables; a question's answer is by default its default."""
    variables = {
        "workspaceFolder": str(project),
        "file": answers.pop("file", ""),
        "command:python.interpreterPath": sys.executable,
    }
    for question in questions:
        answer = answers.pop(question["id"], question["default"])
        variables["input:" + question["id"]] = answer
    assert not answers
    return variables


def configuration(project: Path, name: str, **answers: str) -> dict[str, Any]:
    """A configuration of launch.json with its questions answered."""
    launch = read(project, "launch.json")
    (found,) = (c for c in launch["configurations"] if c["name"] == name)
    return fill_in(found, answered(project, launch["inputs"], answers))


def task(project: Path, label: str, **answers: str) -> dict[str, Any]:
    """A task of tasks.json with its questions answered."""
    tasks = read(project, "tasks.json")
    (found,) = (t for t in tasks["tasks"] if t["label"] == label)
    return fill_in(found, answered(project, tasks["inputs"], answers))


class Session:
    """One process under the debugger, and the adapter's connection that belongs to it."""

    def __init__(self, debugger: "Debugger", reader: Any, writer: Any) -> None:
        self.debugger, self.reader, self.writer = debugger, reader, writer
        self.numbers = itertools.count(1)
        self.responses: dict[int, dict] = {}
        self.stop: dict | None = None  # the body of the latest stopped event, while it is stopped
        self.ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, request: str, arguments: dict[str, Any]) -> None:
        client = {
            "clientID": "vscode",
            "adapterID": "debugpy",
            "pathFormat": "path",
            "linesStartAt1": True,
            "columnsStartAt1": True,
            "supportsVariableType": True,
            "supportsRunInTerminalRequest": True,
            "supportsStartDebuggingRequest": True,
            "supportsArgsCanBeInterpretedByShell": True,
        }
        self.ask("initialize", client)
        self.send({"type": "request", "command": request, "arguments": arguments})

    def configure(self) -> None:
        self.set(self.debugger.breakpoints)
        self.ask("setExceptionBreakpoints", {"filters": ["uncaught"]})
        self.ask("configurationDone")

    def ask(self, command: str, arguments: dict | None = None) -> dict:
        number = self.send({"type": "request", "command": command, "arguments": arguments or {}})
        self.debugger.wait(lambda: number in self.responses or self.ended, command)
        response = self.responses.get(number, {"success": self.ended})
        assert response["success"], (command, response)
        return response.get("body", {})

    def send(self, message: dict) -> int:
        number = message["seq"] = next(self.numbers)
        text = json.dumps(message).encode()
        with contextlib.suppress(OSError):
            self.writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
            self.writer.flush()
        return number

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while header := self.reader.readline():
                size = int(header.split(b":")[1])
                self.reader.readline()
                self._take(json.loads(self.reader.read(size)))
        with self.debugger.changed:
            self.ended = True
            self.debugger.changed.notify_all()

    def _take(self, message: dict) -> None:
        kind = message.get("event") or message.get("command")
        if message["type"] == "request":
            body = self.debugger.serve(kind, message["arguments"])
            answer = {"request_seq": message["seq"], "command": kind, "success": True, "body": body}
            self.send({"type": "response", **answer})
        elif kind == "initialized":
            threading.Thread(target=self.configure, daemon=True).start()
        with self.debugger.changed:
            if message["type"] == "response":
                self.responses[message["request_seq"]] = message
            elif kind == "stopped":
                self.stop = message["body"]
            elif kind == "continued":
                self.stop = None
            elif kind == "terminated":
                self.ended = True
                threading.Thread(target=self._bury, daemon=True).start()
            self.debugger.changed.notify_all()

    def _bury(self) -> None:
        """What follows when the adapter says that the debuggee has ended."""
        self.send({"type": "request", "command": "disconnect", "arguments": {"restart": False}})
        if self is self.debugger.sessions[0] and self.debugger.adapter:
            time.sleep(1)
            self.debugger.adapter.terminate()

    # What a person does with a session.

    def set(self, breakpoints: Breakpoints) -> None:
        for file, places in breakpoints.items():
            path = str(self.debugger.folder / file)
            self.ask("setBreakpoints", {"source": {"path": path}, "breakpoints": places})

    @property
    def frame(self) -> dict:
        """The frame in which it is stopped."""
        assert self.stop
        return self.ask("stackTrace", {"threadId": self.stop["threadId"]})["stackFrames"][0]

    def evaluate(self, expression: str) -> str:
        arguments = {"expression": expression, "frameId": self.frame["id"], "context": "watch"}
        return self.ask("evaluate", arguments)["result"]

    def threads(self) -> list[str]:
        return [thread["name"] for thread in self.ask("threads")["threads"]]

    def go(self, command: str = "continue") -> None:
        assert self.stop
        thread, self.stop = self.stop["threadId"], None
        self.ask(command, {"threadId": thread})

    def disconnect(self) -> None:
        """Stop, pressed on a session that was attached, as those of the ranks are."""
        self.ask("disconnect", {"restart": False, "terminateDebuggee": False})


class Debugger:
    """A window of VS Code: one top session, a terminal, and a session for each child process."""

    def __init__(self, folder: Path, breakpoints: Breakpoints | None = None) -> None:
        self.folder = folder
        self.breakpoints = breakpoints or {}
        self.changed = threading.Condition()
        self.sessions: list[Session] = []
        self.terminal = b""
        self.closing = False
        self.shell: subprocess.Popen | None = None
        self.adapter: subprocess.Popen | None = None
        self.mark = uuid.uuid4().hex
        self.env = {
            **os.environ,
            **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            "DDP_TEMPLATE_TEST": self.mark,
        }

    def launch(self, config: dict[str, Any], debug: bool = True) -> None:
        """F5, or Ctrl+F5 (without debugging)."""
        self.adapter = subprocess.Popen(
            [sys.executable, "-m", "debugpy.adapter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.env,
            start_new_session=True,
        )
        top = Session(self, self.adapter.stdout, self.adapter.stdin)
        self.sessions.append(top)
        more = {"python": config.get("python", sys.executable), "clientOS": "unix"}
        top.begin("launch", {**config, **more} if debug else {**config, **more, "noDebug": True})

    def attach(self, config: dict[str, Any]) -> Session:
        """Attach to where a process listens."""
        where = config["connect"]
        connection = socket.create_connection((where["host"], int(where["port"])), PATIENCE)
        connection.settimeout(None)
        stream = connection.makefile("rwb")
        session = Session(self, stream, stream)
        self.sessions.append(session)
        session.begin("attach", config)
        return session

    def serve(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer what the adapter asks of VS Code."""
        if command == "startDebugging":
            child = {**arguments["configuration"], "request": arguments["request"]}
            threading.Thread(target=self.attach, args=(child,), daemon=True).start()
            return {}
        assert command == "runInTerminal"
        words = arguments["args"]
        if arguments.get("argsCanBeInterpretedByShell"):  # "args" of launch.json is one string
            words = ["bash", "-c", " ".join(words)]
        self.type(words, arguments["cwd"], arguments.get("env", {}))
        return {"shellProcessId": self.shell.pid}

    def type(self, words: list[str], cwd: str | Path, env: dict[str, str]) -> None:
        """Have the terminal run a command."""
        self.screen, tty = pty.openpty()
        fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.shell = subprocess.Popen(
            words,
            cwd=cwd,
            env={**self.env, **env},
            stdin=tty,
            stdout=tty,
            stderr=tty,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(tty)
        self.shown = threading.Thread(target=self._show, daemon=True)
        self.shown.start()

    def _show(self) -> None:
        # The only one to close the screen: nothing is hung up while another thread reads from it.
        with contextlib.suppress(OSError):
            while not self.closing:
                if select.select([self.screen], [], [], 0.05)[0]:
                    self.terminal += os.read(self.screen, 4096)
        os.close(self.screen)

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        with self.changed:
            while not (done := condition()) and time.monotonic() < deadline:
                self.changed.wait(0.1)  # the terminal's text and processes tell of no change
        assert done, f"{what}: not within {PATIENCE} s; the terminal:\n{self.text}"
        return done

    @property
    def text(self) -> str:
        return self.terminal.decode(errors="replace").replace("\r\n", "\n")

    def stopped(self, count: int = 2) -> list[Session]:
        """Wait until `count` processes are stopped; return them in the order of their ranks."""
        self.wait(lambda: len(self.held()) >= count, f"{count} stopped")
        return sorted(self.held(), key=lambda session: session.threads()[0])

    def held(self) -> list[Session]:
        return [session for session in self.sessions if session.stop and not session.ended]

    # What a person does with the window.

    def set(self, breakpoints: Breakpoints) -> None:
        """Put these breakpoints in place of the former ones, in every session."""
        empty: Breakpoints = {file: [] for file in self.breakpoints}
        self.breakpoints = breakpoints
        for session in self.sessions:
            if not session.ended:
                session.set({**empty, **breakpoints})

    def stop(self) -> None:
        """Stop, pressed on the top session."""
        self.sessions[0].ask("terminate")

    def interrupt(self) -> None:
        """Ctrl-C in the terminal."""
        os.write(self.screen, b"\x03")

    def close(self) -> None:
        """The window is closed: its terminal and its adapter are gone."""
        self.closing = True
        self.shown.join()
        self.adapter.kill()

    def left(self, seconds: float) -> list[int]:
        """The processes that are still there after at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def processes(self) -> list[int]:
        for child in (self.shell, self.adapter):
            if child:
                child.poll()
        return marked(self.mark)

    def finish(self) -> int:
        """Wait for the program's own end; return its exit status."""
        return self.wait(lambda: self.shell, "the terminal").wait(PATIENCE)

    def __enter__(self) -> "Debugger":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def line_of(path: Path, text: str) -> int:
    """The number of the only line with `text`."""
    (found,) = (n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return found
