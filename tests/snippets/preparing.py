"""Prepared data: written, with interruptions, and read."""

import os
import signal
from collections.abc import Iterator

from ddpkit.ranks.failures import one_line_errors
from ddpkit.tools import prepare as command
from snippets.data import build


def prepare(words: list[str], last: int | None) -> str:
    """Prepare a data set, killed after `last` samples; return what it prints."""
    out, send = os.pipe()
    if not (pid := os.fork()):
        os.dup2(send, 1)
        tqdm = command.tqdm

        def samples(loader: object, **options: object) -> Iterator:
            for number, sample in enumerate(tqdm(loader, **options)):
                if number == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield sample

        command.tqdm = samples
        with one_line_errors():
            command.main(words)
        os._exit(0)
    os.close(send)
    with open(out) as said:
        text = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (0 if last is None else -signal.SIGKILL)
    return text


def interrupted(source: str, store: str, *flags: str) -> list[str]:
    """Killed after 20 samples, whole, once more."""
    words = ["--data", source, "--output", store, "--workers", "1", *map(str, flags)]
    said = [prepare(words, 20)]
    assert not os.path.exists(store)
    said += [prepare(words, None), prepare(words, None)]
    return "".join(said).splitlines()


def written_to(store: str) -> None:
    """Writing to a picture that was read leaves the store as it is."""
    train_set, _, _ = build(store)
    for picture in train_set.open(3):
        before = picture.read().clone()
        picture.read().zero_()
        assert before.any()
        assert (picture.read() == before).all()
