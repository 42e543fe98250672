"""Functions of ddpkit/ranks and ddpkit/run as they stand, without any process of their own."""

import os
import signal
import zipfile
from argparse import ArgumentTypeError
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpkit import files, launch
from ddpkit.errors import UserError, shorten
from ddpkit.ranks import process, protocol
from ddpkit.run import checkpoint, flags, machine, metrics


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "a"), (4, "a, b, c, d"), (5, "a, b, c, d, ...")]
)
def test_shorten(count: int, text: str) -> None:
    assert shorten("abcde"[:count]) == text


def test_the_line_of_an_error_from_a_loader_worker() -> None:
    text = 'Traceback ...\n  File "x"\nddpkit.errors.UserError: a.jpg: cannot be read\n'
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
        file.write_text("# it's mine\n--a 'x#1' --b 2  # two, it's \"#2\"\n--c d#e\n\n")
        parser = flags.Parser()
        parser.add_argument("--a")
        parser.add_argument("--b", type=int)
        parser.add_argument("--c")
        assert vars(parser.parse_args([f"@{file}"])) == {"a": "x#1", "b": 2, "c": "d#e"}
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

    @pytest.mark.parametrize("text", ["0", "65536", "host", "host:1"])
    def test_ports_that_are_none(self, text: str) -> None:
        with pytest.raises(UserError, match="--debug-port"):
            flags.Parser().parse(["--debug-port", text])


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
        """What a process that was killed has left is removed by the next one."""
        if not (pid := os.fork()):
            with files.filling(tmp_path / "folder") as part:
                (part / "a").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert not (tmp_path / "folder").exists()
        with files.filling(tmp_path / "folder") as part:
            (part / "b").touch()
        assert os.listdir(tmp_path) == ["folder"]
        assert os.listdir(tmp_path / "folder") == ["b"]


class TestCheckpoints:
    def test_damage(self, tmp_path: Path) -> None:
        path = tmp_path / "file.pt"
        checkpoint.write(path, {"a": torch.ones(9)})
        checkpoint.check_archive(path)
        content = path.read_bytes()
        place = content.index(torch.ones(9).numpy().tobytes())
        path.write_bytes(content[:place] + b"x" + content[place + 1 :])
        with pytest.raises(zipfile.BadZipFile):
            checkpoint.check_archive(path)
        path.write_bytes(b"")
        checkpoint.check_archive(path)  # no archive: torch.load says so

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
        with pytest.raises(
            UserError, match=r"last.pt has 2 classes \(a, b\), the data has 3 .*--output-dir"
        ):
            checkpoint.check_classes("last.pt", ["a", "b"], ["a", "c", "d"])


class TestMachine:
    @pytest.mark.parametrize(
        ("quota", "cpus"),
        [
            *((None, 8), ("max 100000\n", 8), ("100000 100000\n", 1), ("150000 100000\n", 2)),
            *(("50000 100000\n", 1), ("900000 100000\n", 8)),
        ],
    )
    def test_quotas(
        self, quota: str | None, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That of a container, of 8 CPUs."""
        if quota:
            (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
        assert machine.cpus() == cpus

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


@pytest.mark.parametrize(
    ("statuses", "status"), [((2, -6), 2), ((1, -6), -6), ((1, -15), 1), ((None, 2), 2)]
)
def test_which_rank_counts(statuses: tuple[int, int], status: int) -> None:
    """A crash before those that it draws with it; but a mistake before what nccl makes of it."""
    assert launch.find_first(statuses) == (statuses.index(status), status)
    assert launch.find_first([0, None]) == (0, 0)


class TestOptimizers:
    def test_states_by_name(self) -> None:
        net, other = torch.nn.Linear(2, 2), torch.nn.Linear(3, 1, bias=False)
        adamw = torch.optim.AdamW([net.bias, net.weight, other.weight], 0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, lambda _: 1.0)
        net(torch.ones(2)).sum().backward()
        adamw.step()
        parts = {"model": net, "optimizer": adamw, "scheduler": scheduler}
        found = checkpoint.take_states(parts)["optimizer"]
        assert found["param_groups"][0]["params"] == ["bias", "weight", "2 (1, 3)"]
        assert [*found["state"]] == ["bias", "weight"]
        assert checkpoint.kinds(parts) == {"optimizer": "AdamW", "scheduler": "LambdaLR"}

    def test_other_groups(self) -> None:
        """In another order they resume, each weight with its own moment; others are refused."""
        net = torch.nn.Linear(2, 2)

        def made(*groups: list[torch.Tensor]) -> dict:
            sgd = torch.optim.SGD([{"params": group} for group in groups], 0.1, 0.9)
            scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
            return {"model": net, "optimizer": sgd, "scheduler": scheduler}

        before = made([net.weight, net.bias])
        net(torch.ones(2)).sum().backward()
        before["optimizer"].step()
        kinds = checkpoint.kinds(before)
        state = {**checkpoint.take_states(before), "kinds": kinds, "path": "last.pt"}
        after = made([net.bias, net.weight])
        checkpoint.load_states(state, after, 1)
        for weight in net.parameters():
            moments = (each["optimizer"].state[weight] for each in (before, after))
            assert torch.equal(*(moment["momentum_buffer"] for moment in moments))
        words = r"groups had 2 weights and have 1 \+ 1, or others\); .*--weights last.pt"
        with pytest.raises(UserError, match=words):
            checkpoint.load_states(state, made([net.weight], [net.bias]), 1)
        state["kinds"] = {"optimizer": "AdamW", "scheduler": "LambdaLR"}
        with pytest.raises(
            UserError, match=r"the optimizer \(it was AdamW and is SGD\); .*--weights"
        ):
            checkpoint.load_states(state, after, 1)

    def test_copies_of_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Values, strides, and the versions of modules stay."""
        monkeypatch.setattr(checkpoint, "ON_HOST", ())
        image = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
        weights = OrderedDict(image=image, part=torch.arange(9.0)[2:5])
        weights._metadata = {"": {"version": 7}}  # type: ignore[attr-defined]
        state = {"model": weights, "number": (torch.tensor(3.0), 1, "a", None)}
        copied = checkpoint.to_host(state)
        image_now, part = copied["model"].values()
        assert copied["model"]._metadata == weights._metadata
        assert torch.equal(image_now, image) and image_now.stride() == image.stride()
        assert part.tolist() == [2, 3, 4] and part is not weights["part"]
        assert copied["number"] == state["number"]

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
            state = {**checkpoint.take_states(parts), "path": "last.pt"}
            state["optimizer"]["state"] = {"0 (4, 3, 3, 3)": moments}
            state["kinds"] = checkpoint.kinds(parts)
            checkpoint.load_states(state, parts, 3)
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
