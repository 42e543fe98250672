"""What strikes at one place in the code. Each takes a data set, a folder and flags."""

import io
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from digest import digest
from forked import Patch, wait

import model
from ddpkit.data import folders
from ddpkit.data.loading import Collate
from ddpkit.errors import UserError
from ddpkit.ranks import distributed, protocol, stopping
from ddpkit.run import checkpoint
from ddpkit.run.folder import Folder
from ddpkit.run.loop import Run
from ddpkit.run.reporting import Reporter
from snippets.faulty import Runs, after_step, wait_for


def bug() -> None:
    raise ValueError("a bug")


def mistake() -> None:
    raise UserError("a mistake")


def hang() -> None:
    time.sleep(600)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.pt")}


def no_numbers(data: str, folder: str, *words: object) -> list:
    """A loss that is not finite on all ranks, on one, and weights alone."""
    runs = Runs(data, folder, words)
    good = runs.train("all", "--epochs", 1)
    before = digest(f"{folder}/all")
    everywhere = runs.train("all", "--epochs", 2, "--lr", 1e30, "--optimizer", "adamw")
    assert digest(f"{folder}/all") == before

    def on_one_rank() -> None:
        forward = model.CrossEntropy.forward

        def bad(self: model.CrossEntropy, *batch: torch.Tensor) -> tuple:
            loss, count = forward(self, *batch)
            return loss * (float("nan") if os.environ["RANK"] == "1" else 1), count

        model.CrossEntropy.forward = bad

    def in_the_weights() -> None:
        save = Run.save

        def patched(self: Run, *args: object) -> None:
            with torch.no_grad():
                next(self.parts["model"].parameters())[0] = float("inf")
            save(self, *args)

        Run.save = patched

    one = runs.train("one", "--epochs", 1, patch=on_one_rank)
    return [good, everywhere, one, runs.train("weights", "--epochs", 1, patch=in_the_weights)]


def disks(data: str, folder: str, *words: object) -> list:
    """A disk that gets full, and one whose folder goes away."""
    runs = Runs(data, folder, words)
    good = runs.train("full", "--epochs", 1)
    before = contents(Path(folder, "full"))

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    full_disk = runs.train("full", "--epochs", 2, "--save-every", 2, patch=full)
    assert contents(Path(folder, "full")) == before
    assert not list(Path(folder, "full").glob("*.part"))
    gone = after_step(3, lambda: shutil.rmtree(f"{folder}/gone"), rank=1)
    return [good, full_disk, runs.train("gone", "--epochs", 2, "--save-every", 4, patch=gone)]


def a_hang(data: str, folder: str, *words: object) -> list:
    runs = Runs(data, folder, words)
    return runs.train("timeout", "--dist-timeout", 5, patch=after_step(3, hang, rank=1))


def interrupted_twice(data: str, folder: str, *words: object) -> dict:
    """While one rank hangs: the statuses, and the seconds that it takes."""
    runs = Runs(data, folder, words)

    def held() -> None:
        Path(folder, "held").touch()
        hang()

    pids = runs.start("twice", patch=after_step(3, held, rank=1))
    wait_for(Path(folder, "held").exists)
    began = time.monotonic()
    for _ in range(2):
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(2)
    return {"statuses": wait(pids), "seconds": time.monotonic() - began}


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def no_answer(data: str, folder: str, *words: object) -> dict:
    """Rank 1 is held by SIGSTOP, of which the launcher does not know; rank 0 gets a signal.

    Then it is let go in time, or killed, or stays.
    """
    stopping.ANSWER_SECONDS, protocol.GRACE_SECONDS = 1, 8
    runs, found = Runs(data, folder, words), {}
    stop = after_step(3, lambda: os.kill(os.getpid(), signal.SIGSTOP), rank=1)
    for name, sent in ("late", signal.SIGCONT), ("dead", signal.SIGKILL), ("held", None):
        first, second = runs.start(name, patch=stop)
        wait_for(lambda pid=second: state_of(pid) == "T")
        began = time.monotonic()
        os.kill(first, signal.SIGTERM)
        time.sleep(5)
        if sent:
            os.kill(second, sent)
        (status,) = wait([first], 30)
        seconds = time.monotonic() - began
        os.kill(second, signal.SIGKILL)
        wait([second])
        found[name] = [status, seconds, *runs.said(name)]
    return found


def watchers(data: str, folder: str, *words: object) -> dict:
    """A signal after step 3, to ranks whose watching thread has a hard time."""

    def many_files() -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
        many_files.kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        after_step(2, lambda: setattr(sys, "stderr", io.StringIO()))()
        after_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM), before=True)()

    def broken() -> None:
        stopping.Stopper.answer = lambda _: bug()
        after_step(3, lambda: (time.sleep(2), os.kill(os.getpid(), signal.SIGTERM)))()

    runs = Runs(data, folder, words)
    return {
        "many files": runs.train("files", patch=many_files),
        "bug": runs.train("bug", patch=broken),
    }


def signals_after_training(data: str, folder: str, *words: object) -> list:
    """A signal when all is saved, with nothing, and with a minute's work, left to do."""

    def at_the_end(seconds: float) -> Patch:
        def patch() -> None:
            def finish(self: Reporter, *_: object) -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(seconds)

            Reporter.finish = finish

        return patch

    runs = Runs(data, folder, words)
    soon = runs.train("soon", "--epochs", 1, patch=at_the_end(0))
    return [soon, runs.train("late", "--epochs", 1, patch=at_the_end(60))]


def a_collective_on_one_rank(data: str, folder: str, *words: object) -> list:
    act = after_step(3, distributed.barrier, rank=0)
    return Runs(data, folder, words).train("one", "--dist-timeout", 5, patch=act)


def ranks_that_leave(data: str, folder: str, *words: object) -> dict:
    def unnoticed(act: Callable[[], object]) -> Patch:
        """As with nccl, where a collective does not raise when a rank has gone."""

        def patch() -> None:
            after_step(3, hang, rank=0)()
            after_step(3, act, rank=1)()

        return patch

    def mistake_at_rank_0() -> None:  # where the store is, which another node reads
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        after_step(3, mistake, rank=0)()
        after_step(3, hang, rank=1)()

    train = Runs(data, folder, words).train
    return {
        "raises": train("raises", patch=after_step(3, bug, rank=1)),
        "leaves": train("leaves", patch=after_step(3, lambda: os._exit(0), rank=1)),
        "unnoticed": [
            train("raises, unnoticed", patch=unnoticed(bug)),
            train("mistake, unnoticed", patch=unnoticed(mistake)),
            train("mistake on another node", patch=mistake_at_rank_0),
        ],
    }


def samples_that_break_their_worker(data: str, folder: str, *words: object) -> list:
    """One that raises, one that dies, one that hangs, and a worker that dies in a save."""

    def at(path: str, act: Callable[[], object]) -> Patch:
        def patch() -> None:
            read = folders.open_image

            def patched(name: str, *args: object) -> object:
                if name.endswith(path):
                    act()
                return read(name, *args)

            folders.open_image = patched

        return patch

    def killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def in_a_save() -> None:
        write = checkpoint.write

        def patched(*args: object) -> None:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
            time.sleep(5)
            write(*args)

        checkpoint.write = patched
        at(".jpg", lambda: time.sleep(0.2))()

    train = Runs(data, folder, words).train
    return [
        train("raises", patch=at("train/dots/0002.jpg", bug)),
        train("dies", patch=at("train/dots/0002.jpg", killed)),
        train("hangs", "--dist-timeout", 8, patch=at("val/dots/0002.jpg", hang)),
        train("dies in a save", "--save-every", 1, patch=in_a_save),
    ]


def signals_at_awkward_moments(data: str, folder: str, *words: object) -> dict:
    """In evaluation and in a save; each is started again."""
    whole = ("--epochs", 2, "--save-every", 3)

    def ask(rank: int) -> None:
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGUSR1)

    def in_evaluation() -> None:
        mean_loss, collate = Run.mean_loss, Collate.__call__

        def slow(self: Collate, samples: list) -> object:
            time.sleep(0.5 if len(samples[0]) > 2 else 0)  # with indices: for evaluation
            return collate(self, samples)

        def patched(self: Run) -> float:
            ask(1)
            return mean_loss(self)

        Run.mean_loss, Collate.__call__ = patched, slow

    def in_a_save() -> None:
        add = Folder.add

        def patched(*args: object, **more: object) -> None:
            ask(0)
            add(*args, **more)

        Folder.add = patched

    train = Runs(data, folder, words).train
    found = {
        "whole": train("whole", *whole),
        "evaluation": train("evaluation", *whole, patch=in_evaluation),
        "rest": train("evaluation", *whole),
        "save": train("save", *whole, patch=in_a_save),
        "more": train("save", *whole),
    }
    digests = [digest(f"{folder}/{name}") for name in ("whole", "evaluation", "save")]
    return {**found, "digests": digests}


def nodes_that_share_no_disk(data: str, folder: str, *words: object) -> dict:
    """The second node alone has a checkpoint."""

    def node() -> None:
        rank = os.environ["RANK"]
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        sys.argv += ["--output-dir", f"{folder}/node{rank}"]

    train = Runs(data, folder, words).train
    train("whole", "--epochs", 2)
    killed = after_step(8, lambda: os.kill(os.getpid(), signal.SIGKILL))
    first = train("node1", "--epochs", 2, "--save-every", 4, patch=killed)
    rest = train("", "--epochs", 2, patch=node)
    digests = [digest(f"{folder}/{name}") for name in ("whole", "node0")]
    return {"killed": first, "rest": rest, "digests": digests}


def stopped_without_resuming(data: str, folder: str, *words: object) -> list:
    """A signal to a run with --resume never."""
    ask = after_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return Runs(data, folder, words).train("never", "--resume", "never", patch=ask)
