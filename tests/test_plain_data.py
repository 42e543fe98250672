"""Functions of ddpkit/data as they stand, without any process of their own."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as F

from ddpkit import files
from ddpkit.data import folders, images, loading, samples
from ddpkit.data.format import MEAN, STD, Format
from ddpkit.errors import DiskError, UserError, print_error
from ddpkit.ranks import distributed
from ddpkit.run import checkpoint, folder


class TestSeeding:
    def test_numbers(self) -> None:
        keys = [(), (0,), (1,), (1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (2**40, 1)]
        found = [samples.hash_key(*key) for key in keys]
        assert len(set(found)) == len(keys)
        assert found == [samples.hash_key(*map(np.int64, key)) for key in keys]
        assert all(0 <= number < 2**64 for number in found)

    def test_generators(self) -> None:
        def drawn(*key: int) -> tuple:
            samples.seed(*key)
            return samples.random.random(), np.random.rand(), torch.rand(1).item()

        first, again, other = drawn(1, 2), drawn(1, 2), drawn(1, 3)
        assert first == again
        assert not {*first} & {*other}

    def test_apples_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are seeded by ranks, and left alone by loader workers, which must not open them."""
        seeds: list[int] = []
        module = SimpleNamespace(manual_seed=seeds.append, is_available=lambda: True)
        monkeypatch.setattr(torch, "get_device_module", lambda: module)
        samples.seed(1)
        assert seeds == [samples.hash_key(1)]
        monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", object())
        samples.seed(2)
        assert len(seeds) == 1


def shares(ranks: int, sampler: Callable, monkeypatch: pytest.MonkeyPatch) -> list[list]:
    """What each of so many ranks takes from its sampler."""
    found = []
    monkeypatch.setattr(distributed, "world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        mine = sampler()
        found.append(list(mine))
        assert len(mine) == len(found[-1])
    return found


class TestSampler:
    @pytest.mark.parametrize("ranks", [2, 3, 4, 6])
    @pytest.mark.parametrize("seen", [0, 24])
    def test_ranks_share_what_one_would_take(
        self, ranks: int, seen: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def sampler() -> loading.TrainSampler:
            each = 12 // distributed.world_size()
            made = loading.TrainSampler([()] * 53, each, 1, seed=5)
            made.set_epoch(3, seen)
            return made

        (alone,) = shares(1, sampler, monkeypatch)
        assert len(alone) == 48 - seen  # 53 are four global batches of 12, and a rest
        assert len({*alone}) == len(alone)
        assert {key.epoch for key in alone} == {3}
        parts = shares(ranks, sampler, monkeypatch)
        each = 12 // ranks
        for step in range(len(alone) // 12):
            mine = [part[step * each : (step + 1) * each] for part in parts]
            together = {key for part in mine for key in part}
            assert together == {*alone[step * 12 : (step + 1) * 12]}

    def test_orders(self) -> None:
        def order(seed: int, epoch: int) -> list[int]:
            sampler = loading.TrainSampler([()] * 40, 4, 2, seed)
            sampler.set_epoch(epoch)
            return [key.draw for key in sampler]

        assert order(1, 0) == order(1, 0)
        assert len({*map(tuple, (order(1, 0), order(1, 1), order(2, 0)))}) == 3

    def test_the_rest_of_an_epoch(self) -> None:
        sampler = loading.TrainSampler([()] * 40, 8, 1, 0)
        whole = list(sampler)
        sampler.set_epoch(0, 16)
        assert list(sampler) == whole[16:]

    def test_a_batch_that_is_too_large(self) -> None:
        with pytest.raises(UserError, match="--batch-size 4 x 1 ranks x --accumulate 3 is more"):
            loading.TrainSampler([()] * 11, 4, 3, 0)

    @pytest.mark.parametrize(
        "total, accumulate, size",
        [(640, 1, 32), (639, 1, 16), (640, 2, 16), (100, 1, 4), (40, 1, 2), (5, 1, 2)],
    )
    def test_default_batch_size(
        self, capsys: pytest.CaptureFixture[str], total: int, accumulate: int, size: int
    ) -> None:
        assert loading.TrainSampler.fitting(range(total), accumulate) == size
        assert (f"--batch-size {size}: with 32" in capsys.readouterr().out) == (size < 32)


@pytest.mark.parametrize("workers", [0, 1])
def test_other_loaders_take_the_seed(workers: int) -> None:
    """Each seed and each epoch has an order of its own; a part of an epoch is its beginning."""

    def order(seed: int, epoch: int, seen: int = 0) -> list[int]:
        loader = DataLoader(range(40), 4, shuffle=True, num_workers=workers)
        source = loading.Foreign(loader, 1, seed)
        assert source.order["seed"] == seed
        return torch.cat([*source.batches(loader, epoch, seen)]).tolist()

    orders = [order(0, 0), order(1, 0), order(0, 1), order(1, 1)]
    assert len({*map(tuple, orders)}) == 4
    assert order(1, 1) == orders[3]
    assert order(1, 1, 20) == orders[3][:20]


class Listed(torch.utils.data.Dataset):
    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        return torch.zeros(3, 4, 4, dtype=torch.uint8), 0


def fingerprint(listed: list) -> str:
    return samples.fingerprint(Listed(listed))


def test_samples_that_are_no_list() -> None:
    """An array has no truth value; only the number of its samples is compared."""
    assert fingerprint(np.zeros((3, 2))).startswith("3 images")
    assert samples.name(Listed(np.zeros((3, 2))), 1) == "sample 1"


def test_fingerprints() -> None:
    first = [("a/1.jpg", 0), ("a/2.jpg", 1)]
    assert fingerprint(first) == fingerprint([("b/1.jpg", 0), ("c/2.jpg", 1)])
    assert samples.fingerprint([()] * 3) == "3 images (00000000)"
    others = [first[:1], [*first, ("a/3.jpg", 0)], first[::-1], [("a/1.jpg", 1), ("a/2.jpg", 1)]]
    assert len({fingerprint(each) for each in (first, *others)}) == 5


class TestSamples:
    def test_packed(self) -> None:
        listed = [("a.jpg", 1), ("é\udcff.jpg", None), ((1, 2), "x")]
        packed = samples.Packed(listed)
        assert list(packed) == listed
        assert packed[-1] == listed[-1]
        assert len(samples.Packed([])) == 0
        with pytest.raises(IndexError):
            packed[3]

    def keyed(self, dataset: object) -> samples.Seeded:
        return samples.Seeded(dataset, 2, 0)

    @pytest.mark.parametrize("label", [-1, 2, np.int64(2), torch.tensor(2)])
    def test_labels_that_are_no_class(self, label: object) -> None:
        with pytest.raises(UserError, match=r"sample 0, a.jpg: label -?\d, .* 0 to 1"):
            self.keyed(Listed([("a.jpg", 0)])).parts(0, (torch.zeros(3, 4, 4), label))

    @pytest.mark.parametrize("label", [0, 1, 2.0, torch.tensor(7.0), torch.full((3,), 9)])
    def test_labels_that_are_left_alone(self, label: object) -> None:
        self.keyed(Listed([("a.jpg", 0)])).parts(0, (torch.zeros(3, 4, 4), label))

    @pytest.mark.parametrize(
        ("sample", "found"),
        [
            (None, "the data set returns NoneType; return .image, target. or a dict"),
            ([torch.zeros(3, 4, 4)], "the data set returns list; return"),
            ({"image": torch.zeros(3, 4, 4), "boxes": 0}, "the data set returns dict; return"),
            ((torch.zeros(3, 4, 4).int(), 0), r".* Tensor \(3, 4, 4\), torch.int32; return"),
            ((torch.zeros(4), 0), r".* Tensor \(4,\), torch.float32; return"),
            (("a.jpg", 0), ".* returns str; return .*: a PIL image, an array"),
            ((torch.zeros(3, 4, 4), "cat"), "the target is 'cat'; return"),
        ],
    )
    def test_samples_of_other_kinds(self, sample: object, found: str) -> None:
        class Other(Listed):
            def __getitem__(self, index: int) -> object:
                return sample

        with pytest.raises(UserError, match=f"sample 0, a.jpg: {found}"):
            self.keyed(Other([("a.jpg", 0)]))[samples.Key(0, 0)]

    def test_samples_as_people_have_them(self) -> None:
        """PIL images, arrays, floats as they are, more parts, dicts; masks of any of these."""
        grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
        pixels = torch.from_numpy(grey)
        floats = torch.randn(3, 3, 4)
        for sample, image, target in (
            ((Image.fromarray(grey), 1), pixels.expand(3, -1, -1), 1),
            ((np.stack([grey] * 5, -1), grey), pixels.expand(5, -1, -1), pixels),
            ((floats, Image.fromarray(grey), "a.jpg"), floats, pixels),
            ({"label": 1, "id": "x", "image": floats}, floats, 1),
        ):
            parts = self.keyed([sample])[samples.Key(0, 0)]
            assert torch.equal(parts[0], image)
            assert torch.equal(torch.as_tensor(parts[1]), torch.as_tensor(target))
            assert len(parts) == len(sample)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_set_epoch(self, workers: int) -> None:
        """The process that reads calls it, before any sample of that epoch, also on resuming."""

        class Curriculum(Listed):
            level, calls = -1, 0

            def set_epoch(self, epoch: int) -> None:
                self.level, self.calls = 10 * epoch, self.calls + 1

            def __getitem__(self, index: int) -> tuple:
                return torch.zeros(3, 4, 4, dtype=torch.uint8), 0, self.level, self.calls

        options = loading.workers(workers, torch.device("cpu"))
        options["collate_fn"] = loading.Collate()
        dataset = Curriculum([("a.jpg", 0)] * 24)
        sampler = loading.TrainSampler(dataset, 4, 1, 0)
        loader = DataLoader(self.keyed(dataset), 4, sampler=sampler, **options)
        for turn, (epoch, seen) in enumerate([(3, 16), (4, 0), (5, 0)], start=1):
            loader.sampler.set_epoch(epoch, seen)
            found = [batch[2:] for batch in loader]
            assert len(found) == 6 - seen // 4
            assert {level for levels, _ in found for level in levels.tolist()} == {10 * epoch}
            assert {count for _, counts in found for count in counts.tolist()} == {turn}
        dataset = Curriculum([("a.jpg", 0)])
        sampler = loading.ValSampler(dataset, 4)
        (batch,) = DataLoader(self.keyed(dataset), batch_sampler=sampler, **options)
        assert [part.tolist() for part in batch[1:]] == [[0], [-1], [0], [0]]

    def test_names(self) -> None:
        assert samples.name(Listed([("a.jpg", 0)]), 0) == "sample 0, a.jpg"
        assert samples.name([()], 0) == "sample 0"

    def test_images_of_several_sizes(self) -> None:
        several = [(torch.zeros(3, 4, side, dtype=torch.uint8), 0) for side in (4, 5)]
        with pytest.raises(UserError, match=r"sample 1 has \(3, 4, 5\), sample 0 \(3, 4, 4\)"):
            self.keyed(several).__getitems__([samples.Key(0, 0), samples.Key(0, 1)])


class TestNormalize:
    def test_values(self) -> None:
        """What ToTensor and Normalize make of them, channels last."""
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (4, 20, 30, 3), dtype=torch.uint8, generator=generator)
        batch = loading.Collate()([(image.movedim(-1, 0), n) for n, image in enumerate(pixels)])
        found, targets = loading.move(batch, torch.device("cpu"), Format())
        scaled = F.to_dtype(pixels.movedim(-1, 1), torch.float32, scale=True)
        expected = F.normalize(scaled, MEAN, STD)
        assert (found - expected).abs().max() < 1e-6
        assert targets.tolist() == [0, 1, 2, 3]
        assert found.is_contiguous(memory_format=torch.channels_last)

    def test_batches_by_size(self) -> None:
        sizes = (4, 5, 4)
        found = loading.Collate()([(torch.zeros(3, 4, side), side) for side in sizes])
        assert isinstance(found, loading.Groups)
        assert [targets.tolist() for _, targets in found] == [[4, 4], [5]]


class TestImages:
    def image(self, shrinks: tuple[int, ...] = ()) -> images.LazyImage:
        return images.LazyImage(100, 200, lambda n: np.zeros((100 // n, 200 // n, 3)), shrinks)

    @pytest.mark.parametrize(
        ("box", "size", "snapped"),
        [
            ((3, 5, 50, 60), None, (3, 5, 50, 60)),
            ((3, 5, 50, 60), (25, 30), (4, 4, 48, 60)),
            ((3, 5, 50, 60), (26, 30), (3, 5, 50, 60)),
            ((-3, 0, 90, 90), (10, 10), (0, 0, 88, 88)),
        ],
    )
    def test_boxes(self, box: tuple, size: tuple | None, snapped: tuple) -> None:
        assert self.image((8, 4, 2)).snap(box, size) == snapped

    def jpeg(self, folder: Path) -> str:
        Image.new("RGB", (64, 48)).save(folder / "x.jpg")
        return str(folder / "x.jpg")

    def test_beyond_the_edges(self, tmp_path: Path) -> None:
        pixels = np.arange(1, 7, dtype=np.uint8).reshape(2, 3)
        mask = images.LazyImage.of(pixels)
        found = mask.read((-1, 1, 3, 3), fill=255)
        assert found.tolist() == [[255, 255, 255], [2, 3, 255], [5, 6, 255]]
        inside = torch.from_numpy(pixels.copy())
        for rows in range(-4, 5):
            for columns in range(-4, 6):
                whole = torch.full((12, 14), 9, dtype=torch.uint8)
                whole[5:7, 5:8] = inside
                expected = whole[5 + rows :][:2, 5 + columns :][:, :2]
                assert torch.equal(mask.read((rows, columns, 2, 2), fill=9), expected)
        image = images.open_image(self.jpeg(tmp_path))
        assert (image.read((-90, -90, 40, 20), (20, 10), fill=9) == 9).all()
        assert image.read((-4, 0, 8, 8), fill=9)[:, :4].eq(9).all()

    def test_names(self, tmp_path: Path) -> None:
        for name in ("b/2.jpg", "1.PNG", ".3.jpg", "4.txt", ".c/5.jpg"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        found = folders.collect([tmp_path, tmp_path / "b" / "2.jpg"])
        assert [name for _, name in found] == ["1", "b/2", "2"]
        assert folders.by_name(found)["b/2"] == str(tmp_path / "b/2.jpg")
        with pytest.raises(UserError, match="the same name"):
            folders.by_name([("a/1.jpg", "1"), ("b/1.jpg", "1")])
        (tmp_path / "empty").mkdir()
        with pytest.raises(UserError, match="no images"):
            folders.list_images(tmp_path / "empty")
        with pytest.raises(UserError, match="No such"):
            folders.list_images(tmp_path / "none")

    @pytest.mark.parametrize(("count", "aside"), [(2, 1), (6, 1), (20, 3), (100, 15)])
    def test_split(self, count: int, aside: int) -> None:
        listed = [(f"/data/{number}.jpg", 0) for number in range(count)]
        train, val = folders.split(listed, Path("/data"))
        assert (len(val), sorted([*train, *val])) == (aside, sorted(listed))
        moved = [(path.replace("data", "other"), 0) for path, _ in listed]
        assert folders.split(moved[::-1], Path("/other"))[1] == [
            (path.replace("data", "other"), 0) for path, _ in val
        ]

    def test_paths_that_come_twice_are_not_on_both_sides(self) -> None:
        listed = [(f"/data/{number}.jpg", 0) for number in range(20)]
        train, val = folders.split(listed + listed, Path("/data"))
        assert not {*train} & {*val}
        assert (len(train), len(val)) == (34, 6)

    def test_too_few_to_split(self) -> None:
        for listed in [("/data/1.jpg", 0)], [("/data/1.jpg", 0)] * 2:
            assert folders.split(listed, Path("/data")) == (listed, [])
        with pytest.raises(UserError, match=r"/data: too few images to split; add more, or .*/val"):
            folders.say_split(Path("/data"), 0, 2)


class TestLists:
    def rows(self, folder: Path, content: str | bytes) -> list[tuple[str, ...]]:
        """What a list of `content` beside the files a.jpg and "b,1.jpg" holds."""
        for name in "a.jpg", "b,1.jpg":
            (folder / name).touch()
        data = content if isinstance(content, bytes) else content.encode()
        (folder / "train.csv").write_bytes(data)
        return folders.read_list(folder / "train.csv", ("file", "label"), count=1)

    def test_rows(self, tmp_path: Path) -> None:
        """As spreadsheets write them: a mark, CRLF, quotes, further columns in another order."""
        content = '\ufefflabel,note,file\r\ncät,,a.jpg\r\n\r\n"cät, old",x,"b,1.jpg"\r\n'
        a, b = (str(tmp_path / name) for name in ("a.jpg", "b,1.jpg"))
        assert self.rows(tmp_path, content) == [(a, "cät"), (b, "cät, old")]

    @pytest.mark.parametrize(
        "name, fault",
        {
            "no column": (
                "file;label\na.jpg;x\n",
                "no column file in its first line, .* file,label",
            ),
            "no value": ("file,label\na.jpg,x\na.jpg,\n", "train.csv, line 3: no label"),
            "short row": ("file,label\na.jpg\n", "train.csv, line 2: no label"),
            "no file": ("file,label\nc.jpg,x\n", "train.csv, line 2: .*c.jpg does not exist"),
            "no rows": ("file,label\n", "train.csv: no rows"),
            "empty": ("", "train.csv: no column file"),
            "not text": (
                "file,label\na.jpg,c\xe4t\n".encode("latin-1"),
                "train.csv: .* in UTF-8",
            ),
        }.items(),
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_faults(self, tmp_path: Path, name: str, fault: tuple[str | bytes, str]) -> None:
        with pytest.raises(UserError, match=fault[1]):
            self.rows(tmp_path, fault[0])


class TestDisks:
    """Of network disks, which at times do not answer."""

    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "WAITS", (1e-6, 1e-6))

    def failing(self, function: Callable, times: int, number: int) -> Callable:
        left = [times]

        def call(*args: object, **kwargs: object) -> object:
            if left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number), str(args[0]))
            return function(*args, **kwargs)

        return call

    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EHOSTDOWN])
    @pytest.mark.parametrize("channels", [None, 3])
    def test_reading(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, channels: int | None
    ) -> None:
        """Read at the third try, or an error that a restart may find mended."""
        path, format = str(tmp_path / "x.png"), images.Format(channels=channels)
        Image.new("RGB", (8, 8)).save(path)
        monkeypatch.setattr(files, "open", self.failing(open, 2, number), raising=False)
        assert images.open_image(path, format).read().shape == (3, 8, 8)
        monkeypatch.setattr(files, "open", self.failing(open, 3, number), raising=False)
        with pytest.raises(DiskError, match=rf"^{path}: the disk does not answer \(.*\)$"):
            images.open_image(path, format)
        monkeypatch.setattr(files, "open", self.failing(open, 1, errno.EACCES), raising=False)
        with pytest.raises(UserError, match=f"{path}: cannot be read .Permission denied"):
            images.open_image(path, format)

    def test_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """os.walk would leave out their images."""
        for number, kind in (errno.ESTALE, DiskError), (errno.EACCES, UserError):
            monkeypatch.setattr(os, "scandir", self.failing(os.scandir, 1, number))
            with pytest.raises(kind, match=f"^{tmp_path}: "):
                folders.list_images(tmp_path)
            monkeypatch.undo()

    @pytest.mark.parametrize("kind", [DiskError, UserError])
    def test_in_a_worker(self, kind: type[Exception]) -> None:
        """Its error comes with a traceback as text, which ends with the line."""
        try:
            raise kind("a.jpg: the disk does not answer (Stale file handle)")
        except kind:
            sent = ExceptionWrapper(where="in DataLoader worker process 0")
        with pytest.raises(kind) as caught:
            sent.reraise()
        assert str(caught.value) == "a.jpg: the disk does not answer (Stale file handle)"

    @pytest.mark.parametrize("call", ["fsync", "replace", "write"])
    def test_saving(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        """A checkpoint is written whole or not at all; no earlier one is taken for it."""
        run, state = folder.Folder(tmp_path, "auto"), dict.fromkeys(folder.KEYS, 0)
        state["model"] = {"w": torch.arange(999)}

        def epochs() -> list[int]:
            return [checkpoint.read(path)["epoch"] for path in run.saves()]

        def save(epoch: int, times: int, number: int) -> None:
            with monkeypatch.context() as patch:
                if call == "write":
                    save = self.failing(torch.save, times, number)
                    patch.setattr(torch, "save", save)
                else:
                    patch.setattr(os, call, self.failing(getattr(os, call), times, number))
                run.add({**state, "epoch": epoch}, epoch == 1, replace=False)

        save(1, 0, 0)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(DiskError, match=r"last.pt: the disk does not answer"):
            save(2, 9, errno.EIO)
        with pytest.raises(UserError, match=r"last.pt: cannot be written \(No space left"):
            save(2, 9, errno.ENOSPC)
        if call == "replace":  # which is not tried again
            return
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        save(2, 2, errno.ESTALE)
        assert epochs() == [2, 1]
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "check_archive", self.failing(open, 9, errno.EIO))
            with pytest.raises(DiskError, match=r"last.pt: the disk does not answer"):
                folder.read_newest(run.saves())
            patch.setattr(os, "listdir", self.failing(os.listdir, 9, errno.ESTALE))
            with pytest.raises(DiskError):
                run.saves()
        assert epochs() == [2, 1]

    def test_what_torch_hides(self, tmp_path: Path) -> None:
        """It raises a RuntimeError if the disk fails within a save."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, before[1]))
            with (
                pytest.raises(UserError, match=r"x.pt: cannot be written \(File too large\)"),
                files.writing(tmp_path / "x.pt") as part,
            ):
                checkpoint.write(part, {"w": torch.zeros(10**5)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list(tmp_path.iterdir())


def test_names_with_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """They cannot begin a line or change a terminal; other names stay as they are."""
    name = "a\nerror: b\x1b[2J\r\x9b\u2028é 猫 \u200d"
    distributed.say(name)
    print_error(UserError(name))
    expected = "a\\nerror: b\\x1b[2J\\r\\x9b\\u2028é 猫 \u200d\n"
    assert capsys.readouterr() == (expected, f"error: {expected}")
