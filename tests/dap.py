"""What VS Code does when F5 is pressed, in the Debug Adapter Protocol, and with tasks.

It reads .vscode/launch.json, fills in variables, starts the adapter, runs the program in a terminal
of its own, and opens one more session for each process that the adapter tells of.
https://microsoft.github.io/debug-adapter-protocol/specification
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generated

PATIENCE = 120  # seconds; a safety net
F5 = "DDP: torch.distributed.launch"
ALARMING = re.compile(
    r"Traceback|Error|Warning|Killed|Terminated|Aborted|_ident is|\b[EWF]\d{4} "
)


def parse(text: str) -> Any:
    """JSON with // comments and trailing commas, as VS Code reads it."""
    string = r'"(?:\\.|[^"\\])*"'
    text = re.sub(rf"({string})|//[^\n]*", lambda m: m[1] or "", text)
    return json.loads(re.sub(rf"({string})|,(?=\s*[\]}}])", lambda m: m[1] or "", text))


def read(project: Path, name: str) -> Any:
    return parse((project / ".vscode" / name).read_text())


def chosen(
    project: Path,
    file: str,
    kind: str,
    title: str,
    answers: dict[str, str],
) -> Any:
    """A part of a file with what VS Code puts in place of variables; some answers are defaults."""
    content = read(project, file)
    (found,) = (
        part for part in content[kind] if part.get("name", part.get("label")) == title
    )
    known = {
        "workspaceFolder": str(project),
        "command:python.interpreterPath": sys.executable,
    }
    for question in content["inputs"]:
        name = question["id"]
        known[f"input:{name}"] = answers.pop(name, question["default"])
    known |= answers  # that is: file
    fill = functools.partial(
        re.sub, r"\$\{(.+?)\}", lambda m: json.dumps(known[m[1]])[1:-1]
    )
    return json.loads(fill(json.dumps(found)))


def configuration(project: Path, name: str, **answers: str) -> dict[str, Any]:
    """A configuration of launch.json with its questions answered; file: the one that is open.

    Also with what the Python debugger's extension adds where it says nothing, and with the task
    that comes before it, whose questions VS Code asks next.
    """
    flags = answers.get("flags", "")
    found = chosen(project, "launch.json", "configurations", name, answers)
    if "preLaunchTask" in found:
        found["preLaunchTask"] = task(project, found["preLaunchTask"], debugged=flags)
    return {
        "cwd": str(project),
        "console": "integratedTerminal",
        "justMyCode": True,
        **found,
    }


def task(project: Path, label: str, **answers: str) -> dict[str, Any]:
    """A task of tasks.json with its questions answered."""
    return chosen(project, "tasks.json", "tasks", label, answers)


def line_of(path: Path, text: str) -> int:
    """The number of the only line with `text`."""
    lines = path.read_text().splitlines()
    (found,) = (n for n, line in enumerate(lines, 1) if text in line)
    return found


class Session:
    """One process under the debugger, and the adapter's connection that belongs to it."""

    filters = ("uncaught",)  # of the pane "Breakpoints": at which exceptions it stops

    def __init__(self, debugger: "Debugger", reader: Any, writer: Any) -> None:
        self.debugger = debugger
        self.reader = reader
        self.writer = writer
        self.numbers = itertools.count(1)
        self.responses: dict[int, dict] = {}
        # the body of the latest stopped event, while it is stopped
        self.stop: dict | None = None
        self.ended = False
        debugger.in_thread(self._read)

    def begin(self, request: str, arguments: dict[str, Any]) -> None:
        abilities = (
            "RunInTerminalRequest",
            "StartDebuggingRequest",
            "ArgsCanBeInterpretedByShell",
        )
        client = {f"supports{name}": True for name in abilities}
        self.ask("initialize", {"clientID": "vscode", "adapterID": "debugpy", **client})
        self.send({"type": "request", "command": request, "arguments": arguments})

    def configure(self) -> None:
        self.set(self.debugger.breakpoints)
        self.ask("setExceptionBreakpoints", {"filters": [*self.filters]})
        self.ask("configurationDone")

    def ask(self, command: str, arguments: dict | None = None) -> dict:
        number = self.send(
            {"type": "request", "command": command, "arguments": arguments or {}}
        )
        self.debugger.wait(lambda: number in self.responses or self.ended, command)
        response = self.responses.get(number, {"success": self.ended})
        assert response["success"], (command, response)
        return response.get("body", {})

    def send(self, message: dict) -> int:
        number = message["seq"] = next(self.numbers)
        text = json.dumps(message).encode()
        with contextlib.suppress(OSError, ValueError):
            self.writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
            self.writer.flush()
        return number

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for header in self.reader:
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
            answer = {
                "request_seq": message["seq"],
                "command": kind,
                "success": True,
                "body": body,
            }
            self.send({"type": "response", **answer})
        elif kind == "initialized":
            self.debugger.in_thread(self.configure)
        with self.debugger.changed:
            if message["type"] == "response":
                self.responses[message["request_seq"]] = message
            elif kind == "stopped":
                self.stop = message["body"]
            elif kind == "continued":
                self.stop = None
            elif kind == "terminated":  # the debuggee has ended
                self.ended = True
                words = {"command": "disconnect", "arguments": {"restart": False}}
                self.send({"type": "request", **words})
                if self is self.debugger.sessions[0] and self.debugger.adapter:
                    self.debugger.in_thread(self.debugger.adapter.stdin.close)
            self.debugger.changed.notify_all()

    # What a person does with a session.

    def set(self, breakpoints: dict[str, list]) -> None:
        for file, places in breakpoints.items():
            path = str(self.debugger.folder / file)
            self.ask(
                "setBreakpoints", {"source": {"path": path}, "breakpoints": places}
            )

    @property
    def frame(self) -> dict:
        """The frame in which it is stopped."""
        assert self.stop
        stack = self.ask("stackTrace", {"threadId": self.stop["threadId"]})
        return stack["stackFrames"][0]

    def evaluate(self, expression: str) -> str:
        arguments = {
            "expression": expression,
            "frameId": self.frame["id"],
            "context": "watch",
        }
        return self.ask("evaluate", arguments)["result"]

    def threads(self) -> list[str]:
        return [thread["name"] for thread in self.ask("threads")["threads"]]

    def error(self) -> str:
        """The message of the exception at which it is stopped."""
        assert self.stop, self.stop
        assert self.stop["reason"] == "exception", self.stop
        info = self.ask("exceptionInfo", {"threadId": self.stop["threadId"]})
        return info["description"]

    def go(self, command: str = "continue") -> None:
        assert self.stop
        thread = self.stop["threadId"]
        self.stop = None
        self.ask(command, {"threadId": thread})

    def disconnect(self) -> None:
        """Stop, pressed on a session that was attached, as those of the ranks are."""
        self.ask("disconnect", {"restart": False, "terminateDebuggee": False})


class Debugger:
    """A window of VS Code: one top session, a terminal, and a session for each child process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = tempfile.TemporaryDirectory(prefix="f5-")  # of the terminal
        # file -> [{"line": 7, "condition": "rank == 1"}]
        self.breakpoints: dict[str, list] = {}
        self.changed = threading.Condition()
        self.sessions: list[Session] = []
        self.threads: list[threading.Thread] = []
        self.terminal = b""
        self.closing = False
        self.shell: subprocess.Popen | None = None
        self.adapter: subprocess.Popen | None = None

    def in_thread(self, act: Callable[..., object], *arguments: object) -> None:
        """Call `act` beside the test, until it ends or the window does."""
        self.threads.append(threading.Thread(target=act, args=arguments, daemon=True))
        self.threads[-1].start()

    def launch(self, config: dict[str, Any], debug: bool = True) -> None:
        """F5, or Ctrl+F5 (without debugging); nothing starts if the task before it fails."""
        config = config.copy()
        before = config.pop("preLaunchTask", None)
        if before:
            python = config.get("python", [before["command"]])  # the selected one
            done = subprocess.run(
                [*python, *before["args"]],
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self.terminal += done.stdout
            if done.returncode:
                return
        command = [sys.executable, "-m", "debugpy.adapter"]
        pipe = subprocess.PIPE
        self.adapter = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.sessions.append(Session(self, self.adapter.stdout, self.adapter.stdin))
        more = {"python": sys.executable, "clientOS": "unix", "noDebug": not debug}
        self.sessions[0].begin("launch", {**more, **config})

    def attach(self, config: dict[str, Any]) -> None:
        """Attach to where a process listens."""
        where = config["connect"]
        address = (where["host"], int(where["port"]))
        with socket.create_connection(address, PATIENCE) as connection:
            connection.settimeout(None)
            stream = connection.makefile("rwb")
        session = Session(self, stream, stream)
        self.sessions.append(session)
        session.begin("attach", config)

    def serve(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer what the adapter asks of VS Code."""
        if command == "startDebugging":
            child = {**arguments["configuration"], "request": arguments["request"]}
            self.in_thread(self.attach, child)
            return {}
        assert command == "runInTerminal"
        words = arguments["args"]
        # "args" of launch.json is one string
        if arguments.get("argsCanBeInterpretedByShell"):
            words = ["bash", "-c", " ".join(words)]
        self.screen, tty = pty.openpty()
        self.shell = subprocess.Popen(
            words,
            cwd=arguments["cwd"],
            env={
                "PYTHONPATH": generated.LEAN,
                **os.environ,
                "TMPDIR": self.temporary.name,
                **arguments["env"],
            },
            **dict.fromkeys(("stdin", "stdout", "stderr"), tty),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(tty)
        self.in_thread(self._show)
        return {"shellProcessId": self.shell.pid}

    def _show(self) -> None:
        # The only one to close the screen: nothing is hung up while another thread
        # reads from it.
        with contextlib.suppress(OSError):
            while not self.closing:
                if select.select([self.screen], [], [], 0.05)[0]:
                    self.terminal += os.read(self.screen, 4096)
        os.close(self.screen)

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        with self.changed:
            done = condition()
            while not done and time.monotonic() < deadline:
                # the terminal's text and processes tell of no change
                self.changed.wait(0.1)
                done = condition()
        assert done, f"{what}: not within {PATIENCE} s; the terminal:\n{self.text}"
        return done

    @property
    def text(self) -> str:  # in the terminal
        return self.terminal.decode(errors="replace").replace("\r\n", "\n")

    def stopped(self, count: int = 2) -> list[Session]:
        """Wait until `count` processes are stopped; return them in the order of their ranks."""
        self.wait(lambda: len(self.held()) >= count, f"{count} stopped")
        found = sorted(self.held(), key=lambda session: session.threads()[0])
        assert len(found) == count
        return found

    def held(self) -> list[Session]:
        return [
            session for session in self.sessions if session.stop and not session.ended
        ]

    # What a person does with the window.

    def set(self, file: str = "main.py", text: str = "", **more: str) -> None:
        """Put a breakpoint at the line with `text` in place of the former one, everywhere."""
        self.breakpoints = {name: [] for name in self.breakpoints}
        if text:
            self.breakpoints[file] = [
                {"line": line_of(self.folder / file, text), **more}
            ]
        for session in self.sessions:
            if not session.ended:
                session.set(self.breakpoints)

    def go(self, command: str = "continue", count: int = 2) -> list[Session]:
        """Continue all that are stopped, until `count` of them are so again."""
        for session in self.held():
            session.go(command)
        return self.stopped(count)

    def stop(self) -> None:
        """Stop, pressed on the top session."""
        self.sessions[0].ask("terminate")

    def interrupt(self) -> None:
        os.write(self.screen, b"\x03")  # Ctrl-C in the terminal

    def close(self) -> None:
        self.closing = True  # the terminal's end
        self.adapter.kill()

    def finish(self) -> int:
        """Wait for the program's own end; return its exit status."""
        return self.wait(lambda: self.shell, "the terminal").wait(PATIENCE)

    def left_files(self) -> list[str]:
        """What is still there in 5 s, besides the cache that torch keeps for all runs."""
        deadline = time.monotonic() + 5
        while True:
            found = [path.name for path in Path(self.temporary.name).rglob("*")]
            left = [name for name in found if not name.startswith("torchinductor_")]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def all_end(self) -> str:
        """Soon no process or file is left, and the terminal is not alarming; return its text."""
        assert not generated.left(30)
        left = self.left_files()
        assert not left, left
        assert not ALARMING.search(self.text), self.text
        return self.text

    def __enter__(self) -> "Debugger":
        return self

    def __exit__(self, *_: object) -> None:
        self.closing = True
        # also what those start that are ended here
        while there := generated.children():
            generated.kill(there, signal.SIGKILL)
            time.sleep(0.05)
        for process in filter(None, (self.shell, self.adapter)):
            process.wait()
        for thread in self.threads:
            thread.join(10)
        self.temporary.cleanup()
