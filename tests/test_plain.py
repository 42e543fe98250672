"""Functions of engine/ranks and engine/run as they stand, without any process of their own."""

import contextlib
import os
import signal
import socket
import weakref
import zipfile
import zlib
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ports import free_port

from engine import files
from engine.errors import UserError, shorten
from engine.ranks import launcher, process, protocol, reaching
from engine.run import checkpoint, flags, machine, metrics, optimizers, sizes


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "a"), (4, "a, b, c, d"), (5, "a, b, c, d, ...")]
)
def test_shorten(count: int, text: str) -> None:
    assert shorten("abcde"[:count]) == text


def test_the_line_of_an_error_from_a_loader_worker() -> None:
    text = 'Traceback ...\n  File "x"\nengine.errors.UserError: a.jpg: cannot be read\n'
    assert str(UserError(text)) == "a.jpg: cannot be read"


class TestFlags:
    @pytest.mark.parametrize(
        ("low", "kind", "text", "value"),
        [(0, int, "0", 0), (1, int, "7", 7), (0, float, "1e-3", 0.001), (0.5, float, "0.5", 0.5)],
    )
    def test_numbers(self, low: float, kind: type, text: str, value: float) -> None:
        found = flags.at_least(low, kind)(text)
        assert (found, type(found)) == (value, kind)

    @pytest.mark.parametrize(
        ("low", "kind", "text"),
        [
            *((1, int, "0"), (0, int, "-1"), (1, int, "1.5"), (1, int, "x")),
            *((0, float, "nan"), (0, float, "inf"), (0, float, "-1e-9"), (0, float, "x")),
        ],
    )
    def test_numbers_that_are_refused(self, low: float, kind: type, text: str) -> None:
        name = "an integer" if kind is int else "a number"
        with pytest.raises(ArgumentTypeError, match=f"{text} is not {name} of {low} or more"):
            flags.at_least(low, kind)(text)

    def test_mistakes(self) -> None:
        parser = flags.Parser(prog="main.py")
        parser.add_argument("--epochs", type=flags.at_least(1))
        for words in (["--epochs", "0"], ["--epochs", "two"], ["--epoch", "3"]):
            with pytest.raises(UserError, match=r"\(main.py --help lists the flags\)"):
                parser.parse_args(words)

    def test_lines_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "flags"
        file.write_text("# it's mine\n--a 'x #1' --b 2  # two, it's \"#2\"\n--c d#e\n\n")
        parser = flags.Parser()
        parser.add_argument("--a")
        parser.add_argument("--b", type=int)
        parser.add_argument("--c")
        assert vars(parser.parse_args([f"@{file}"])) == {"a": "x #1", "b": 2, "c": "d#e"}
        file.write_text("--a -1000,3000 --c -.5,-1e-3,2 # CT\n--b -4\n")
        found = parser.parse_args([f"@{file}"])
        assert vars(found) == {"a": "-1000,3000", "b": -4, "c": "-.5,-1e-3,2"}
        for words in (["--a", "--b"], ["-1000,3000"], ["--a", "-x"]):
            with pytest.raises(UserError, match=r"expected one argument|unrecognized"):
                parser.parse_args(words)
        file.write_text("--a it's\n")
        with pytest.raises(UserError, match="No closing quotation"):
            parser.parse_args([f"@{file}"])

    def test_flags_of_a_checkpoint(self) -> None:
        """Its own count, also for a flag that has to be given; newer ones get their default."""
        parser = flags.Parser()
        parser.add_argument("--labels", type=Path, required=True)
        parser.add_argument("--newer", type=int, default=4)
        found = parser.parse([], {"labels": "a", "older": 0.1})
        assert vars(found) == {"labels": Path("a"), "newer": 4, "older": 0.1}

    def test_help(self) -> None:
        parser = flags.Parser()
        parser.add_argument("--a", default=3, help="number")
        parser.add_argument("--b", help="none")
        parser.add_argument("--c", action="store_true", help="off")
        text = parser.format_help()
        assert "number (default: 3)" in text
        assert text.count("default") == 1

    @pytest.mark.parametrize(("text", "found"), [("0", [0]), ("3,0,3", [0, 3])])
    def test_ranks(self, text: str, found: list[int]) -> None:
        assert flags.ranks(text) == found

    @pytest.mark.parametrize("text", ["", "one", "-1", "0,", "1;2"])
    def test_ranks_that_are_none(self, text: str) -> None:
        with pytest.raises(ArgumentTypeError, match="not a rank or a list"):
            flags.ranks(text)

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("5678", ("127.0.0.1", 5678)),
            ("0.0.0.0:1", ("0.0.0.0", 1)),
            ("[::1]:65535", ("::1", 65535)),
        ],
    )
    def test_addresses(self, text: str, found: tuple[str, int]) -> None:
        assert flags.address(text) == found

    @pytest.mark.parametrize("text", ["0", "65536", "host", "host:", "5678:host"])
    def test_addresses_that_are_none(self, text: str) -> None:
        with pytest.raises(ArgumentTypeError, match="from 1 to 65535"):
            flags.address(text)


class TestFiles:
    def test_writing(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "file"
        with files.writing(path, parents=True) as part:
            part.write_text("one")
            assert not path.exists()
        assert path.read_text() == "one"
        with pytest.raises(ZeroDivisionError), files.writing(path) as part:
            part.write_text("two")
            raise ZeroDivisionError
        full = pytest.raises(UserError, match=r"file: cannot be written \(No space")
        with full, files.writing(path) as part:
            part.write_text("three")
            raise OSError(28, "No space left on device")
        assert path.read_text() == "one"
        assert os.listdir(path.parent) == ["file"]

    def test_a_table(self, tmp_path: Path) -> None:
        path, partial = tmp_path / "table.csv", tmp_path / "table.csv.partial"
        with files.table(path, ["file"]):
            pass
        assert not list(tmp_path.iterdir())
        with pytest.raises(ZeroDivisionError), files.table(path, ["file"]) as write:
            write(["\udcff"])
            raise ZeroDivisionError
        assert partial.read_bytes() == b"file\n\xff\n"
        with files.table(path, ["file"]) as write:
            write(["a"])
        assert {path.name: path.read_text()} == {p.name: p.read_text() for p in tmp_path.iterdir()}

    def test_filling(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        with pytest.raises(ZeroDivisionError), files.filling(folder) as part:
            (part / "a").touch()
            raise ZeroDivisionError
        assert not list(tmp_path.iterdir())
        for name in ("first", "second"):
            with files.filling(folder) as part:
                (part / name).touch()
        assert os.listdir(tmp_path) == ["folder"]
        assert os.listdir(folder) == ["first"]

    def test_filling_is_ended(self, tmp_path: Path) -> None:
        """By SIGTERM, even in a callback whose exceptions Python drops; imports have such ones."""

        def on_removal(_: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            assert list(range(9))  # some steps, in case that the handler is called only now

        if not (pid := os.fork()):
            with contextlib.suppress(BaseException), files.filling(tmp_path / "folder") as part:
                (part / "a").touch()
                thing = {"a"}
                reference = weakref.ref(thing, on_removal)
                del thing
            os._exit(reference() is None)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
        assert not list(tmp_path.iterdir())


class TestCheckpoints:
    @pytest.mark.parametrize("length", [0, 1, 2**20 - 1, 2**20, 2**20 + 1])
    def test_checksums(self, tmp_path: Path, length: int) -> None:
        content = np.random.default_rng(0).bytes(length)
        (tmp_path / "file").write_bytes(content + b"more")
        with open(tmp_path / "file", "rb") as file:
            found = checkpoint.compute_checksum(file, length)
        assert found == b"%08x" % zlib.crc32(content)

    def test_a_file_with_a_checksum(self, tmp_path: Path) -> None:
        path = tmp_path / "file.pt"
        torch.save({"a": torch.ones(9)}, path)
        assert not checkpoint.has_checksum(path)
        checkpoint.write(path, {"a": torch.ones(9)}, verify=True)
        assert checkpoint.has_checksum(path)
        content = path.read_bytes()
        path.write_bytes(content[:50] + b"x" + content[51:])
        with pytest.raises(zipfile.BadZipFile):
            checkpoint.has_checksum(path)
        path.write_bytes(b"")
        assert not checkpoint.has_checksum(path)

    @pytest.mark.parametrize(
        ("value", "plain"),
        [
            *((1, 1), (True, True), (None, None), ("x", "x"), (0.5, 0.5)),
            *((np.float32(0.5), 0.5), (torch.tensor(2), 2), (Path("a/b"), "a/b")),
            ({"a": [np.int64(1), (Path("x"),)]}, {"a": [1, ("x",)]}),
        ],
    )
    def test_plain_types(self, value: object, plain: object) -> None:
        found = checkpoint.to_plain(value)
        assert (found, type(found)) == (plain, type(plain))

    def test_classes(self) -> None:
        checkpoint.check_classes("last.pt", ["a", "b"], ["a", "b"])
        with pytest.raises(UserError, match=r"the checkpoint: b; only the data: c, d"):
            checkpoint.check_classes("last.pt", ["a", "b"], ["a", "c", "d"])


class TestMachine:
    CASES = (
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2),
        ("0::/host/path\n", {"cpu.max": "20000 100000\n"}, 1),
        ("5:cpu:/job\n", {}, 8),
    )

    @pytest.mark.parametrize(("group", "limits", "cpus"), CASES)
    def test_quotas(
        self, group: str, limits: dict, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That of a cgroup, at any level."""
        for name, text in limits.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "group").write_text(group)
        own = {"/proc/self/cgroup": tmp_path / "group"}
        monkeypatch.setattr(machine, "Path", lambda path: own.get(path, Path(path)))
        monkeypatch.setattr(machine, "CGROUPS", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
        assert machine.cpus() == cpus

    def test_affinity(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "_quota", lambda: 7.5)
        for count in (1, 7, 9):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=count: {*range(n)})
            assert machine.cpus() == min(count, 8)

    @pytest.mark.parametrize(
        ("ranks", "per_task", "share"), [(1, "0", 8), (8, "0", 1), (8, "8", 8), (3, "1", 2)]
    )
    def test_shares(
        self, ranks: int, per_task: str, share: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of 8 CPUs, which srun may have dealt out already."""
        monkeypatch.setattr(machine, "cpus", lambda: 8)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", per_task)
        assert machine.cpu_share() == share

    @pytest.mark.parametrize(
        ("given", "cuda", "threads"),
        [("", False, 8), ("", True, 4), ("1", False, 1), ("3", True, 3), ("x", False, 8)],
    )
    def test_threads(
        self, given: str, cuda: bool, threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "cpu_share", lambda: 8)
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert machine.default_threads(cuda) == threads

    def test_threads_that_a_launcher_has_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """1, by launch.sh or by plain torchrun: nobody has asked for that."""
        monkeypatch.setattr(machine, "cpu_share", lambda: 8)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with monkeypatch.context() as by_torchrun:
            by_torchrun.setattr(process, "by_plain_torchrun", lambda: True)
            assert machine.default_threads(False) == 8
        monkeypatch.setenv(protocol.THREADS, "auto")
        assert machine.default_threads(False) == 8


def test_names(capsys: pytest.CaptureFixture) -> None:
    """That of another node is told at once; for a while it may still come to be known."""
    reaching.wait_for_name("localhost")
    with pytest.raises(UserError, match=r"MASTER_ADDR=nowhere\.invalid cannot be resolved"):
        reaching.wait_for_name("nowhere.invalid", seconds=0.1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; trying for 0.1 s")


def test_another_hosts_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 is told that it is at an address of another host: not ten minutes of silence."""

    def refuse(address: tuple[str, int], *_: object) -> None:
        raise ConnectionRefusedError(address)  # some networks answer in the name of any host

    for host in ("localhost", "127.0.0.1", socket.gethostname()):
        reaching.check_own(host, 0, seconds=0)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(UserError, match=r"MASTER_ADDR=198\.51\.100\.1 does not lead to .*: set it"):
        reaching.check_own("198.51.100.1", free_port(), seconds=0.5)


@pytest.mark.parametrize(
    ("statuses", "status"), [((2, -6), 2), ((1, -6), -6), ((1, -15), 1), ((1, 2), 1)]
)
def test_which_rank_counts(statuses: tuple[int, int], status: int) -> None:
    """A crash before those that it draws with it; but a mistake before what nccl makes of it."""
    failures = {
        i: SimpleNamespace(exitcode=status, timestamp=i) for i, status in enumerate(statuses)
    }
    error = SimpleNamespace(failures=failures, get_first_failure=lambda: (0, failures[0]))
    assert launcher.root_cause(error)[1].exitcode == status


class TestOptimizers:
    def test_layouts(self) -> None:
        net = torch.nn.Linear(2, 2)
        adamw = torch.optim.AdamW(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, lambda _: 1.0)
        found = optimizers.layout({"model": net, "optimizer": adamw, "scheduler": scheduler})
        assert found == {
            "optimizer": ["AdamW", [["weight", "bias"]]],
            "scheduler": ["LambdaLR"],
        }
        amsgrad = torch.optim.AdamW(net.parameters(), 0.1, amsgrad=True)
        assert optimizers.layout({"optimizer": amsgrad})["optimizer"][0] == "AdamW amsgrad"

    @pytest.mark.parametrize(
        ("now", "words"),
        [
            (["SGD", [["a", "b"]]], "the optimizer was AdamW and is SGD"),
            (["AdamW", [["a"], ["b"]]], "groups had 2 weights and have 1 . 1"),
            (["AdamW", [["b", "a"]]], "groups have b where a was"),
        ],
    )
    def test_another_layout(self, now: list, words: str) -> None:
        then = {"optimizer": ["AdamW", [["a", "b"]]], "ema": [1]}
        optimizers.check_layout("last.pt", then, {"optimizer": then["optimizer"]})
        with pytest.raises(UserError, match=f"{words}.*--weights last.pt"):
            optimizers.check_layout("last.pt", then, {"optimizer": now})

    def test_another_memory_format(self) -> None:
        """A fused optimizer takes the order in memory for granted; other moments are put right."""
        last = torch.channels_last
        weight, mean, square, grad = (torch.rand(4, 3, 3, 3) for _ in range(4))
        ends = []
        for fused in (True, False):
            w = torch.nn.Parameter(weight.contiguous(memory_format=last))
            optimizer = torch.optim.AdamW([w], 0.1, fused=fused)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            moments = {"exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
            moments["step"] = torch.tensor(3.0)
            parts = {"optimizer": optimizer, "scheduler": scheduler}
            saved = {**optimizer.state_dict(), "state": {0: moments}}
            state = {"optimizer": saved, "scheduler": scheduler.state_dict()}
            state.update(path="last.pt", layout=optimizers.layout(parts))
            optimizers.load_states(state, parts, 3, 9)
            w.grad = grad.contiguous(memory_format=last)
            optimizer.step()
            ends.append(w.detach())
        assert torch.allclose(*ends, atol=1e-6)


def test_float32() -> None:
    outputs = {"a": (torch.ones(1, dtype=torch.bfloat16), 1), "b": torch.ones(1).long()}
    found = metrics.to_float32(outputs)
    assert (found["a"][0].dtype, found["a"][1]) == (torch.float32, 1)
    assert found["b"].dtype == torch.int64


def test_what_a_network_returns() -> None:
    logits = torch.ones(1).bfloat16()
    for outputs in logits, (logits, 1), {"out": logits}:
        assert metrics.first(outputs).dtype == torch.float32
    for outputs in {}, (1, logits), None:
        with pytest.raises(UserError, match="without logits"):
            metrics.first(outputs)


def test_a_network_that_decides_by_its_numbers() -> None:
    """It cannot be tried on the device meta, but takes any size."""

    class Deciding(torch.nn.Conv2d):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(image)
            return outputs if outputs.sum() > 0 else -outputs

    assert sizes.fit_input(lambda: Deciding(3, 2, 1), 8)
