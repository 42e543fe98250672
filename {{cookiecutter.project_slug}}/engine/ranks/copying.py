"""Copies what ranks write into pipes, as a process of its own; logs.py starts it.

Its input is JSON: for each pipe its file descriptor, the stream of this process (1 or 2) that
gets all of it at once, the file to which whole lines are appended, and the first line for that.
"""

import contextlib
import json
import os
import select
import sys

CHUNK = 65536  # bytes; what a pipe holds on Linux


class File:
    """A rank's file, to which nothing more is written once that has failed."""

    def __init__(self, path: str, header: str) -> None:
        self.path = path
        self.fd: int | None = None
        self.has_failed = False
        self.write(header.encode(errors="backslashreplace") + b"\n")

    def write(self, lines: bytes) -> None:
        if self.has_failed:
            return
        try:
            if self.fd is None:
                self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            write(self.fd, lines)
        except OSError as error:
            self.has_failed = True
            line = f"{self.path}: cannot be written ({error.strerror}); it gets no further lines\n"
            with contextlib.suppress(OSError):
                write(2, line.encode(errors="backslashreplace"))


class Pipe:
    def __init__(self, fd: int, stream: int, file: File) -> None:
        self.fd = fd
        self.stream: int | None = stream
        self.file = file
        self.rest = b""  # of a line whose end has not come yet

    def copy(self) -> bool:
        """Copy what there is; return whether more may come."""
        chunk = os.read(self.fd, CHUNK)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if not chunk and self.rest:
            lines, self.rest = [self.rest], b""
        self.rest = visible(self.rest)
        if lines:
            self.file.write(b"".join(visible(line) + b"\n" for line in lines))
        if self.stream is not None:
            try:
                write(self.stream, chunk)
            except OSError:  # nobody reads it, or the terminal is closed
                self.stream = None
        return bool(chunk)


def visible(line: bytes) -> bytes:
    """Return `line` without what a progress bar has written over; a \\r at its end is a line's."""
    return line[line.rfind(b"\r", 0, -1) + 1 :]


def write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another program has set the terminal so
            select.select([], [fd], [])


def main(orders: list[tuple[int, int, str, str]]) -> None:
    headers = {path: header for _, _, path, header in orders}
    files = {path: File(path, header) for path, header in headers.items()}
    pipes = {fd: Pipe(fd, stream, files[path]) for fd, stream, path, _ in orders}
    while pipes:
        for fd in select.select(list(pipes), [], [])[0]:
            if not pipes[fd].copy():
                del pipes[fd]


if __name__ == "__main__":
    main([tuple(order) for order in json.load(sys.stdin)])
