"""Files that are damaged, missing or half written: what a start makes of them."""

import os
import re
import shutil
import uuid
import zipfile
from pathlib import Path

from running import SAME_FOR_BOTH, Project, finish, flags, rows, start


def damage(path: Path) -> None:
    """Turn over one bit of a tensor."""
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.file_size)
    content = bytearray(path.read_bytes())
    content[entry.header_offset + 200 + entry.file_size // 2] ^= 1
    path.write_bytes(content)


@SAME_FOR_BOTH
def test_what_is_kept(project: Project, tmp_path: Path) -> None:
    """The last two, the best, and what is not ours."""
    found = project.call("checkpoints.kept", tmp_path)
    assert found["epochs"] == [[0], [1, 0], [2, 1], [3, 2], [4, 3]]
    assert found["best"] == 1
    assert found["files"] == ["best.pt", "last-1.pt", "last-2024-05-01.pt", "last.pt"]


@SAME_FOR_BOTH
def test_killed_within_a_save(project: Project, tmp_path: Path) -> None:
    """Whichever call it dies in, the newest checkpoint is the former one or the new one."""
    found = project.call("checkpoints.killed_within_a_save", tmp_path / "run")
    assert found["calls"] >= 8
    assert found["reached"] == [[0, 3], [7, 2], [7, 3]]
    said = project.call("checkpoints.full_disk", tmp_path / "run")
    assert said.endswith("last.pt: cannot be written (No space left on device)")


@SAME_FOR_BOTH
def test_damaged_checkpoints(project: Project, data: Path, tmp_path: Path) -> None:
    """The one before is taken; with none before it nothing is begun and nothing changed."""
    out = tmp_path / "out"
    project.alone(*flags(data, out, "--epochs", 2), draws=False).ok()
    damage(out / "last.pt")
    whole = shutil.copytree(out, tmp_path / "copy")
    done = project.fork(*flags(data, out, "--epochs", 3), draws=False).ok()
    assert "last.pt: not a readable checkpoint" in done.out
    assert "renamed to last.pt.corrupt, continuing from last-1.pt" in done.out
    assert "last-1.pt: 1 of 3 epochs done" in done.out
    assert [row["epoch"] for row in rows(out)] == ["1", "2", "3"]
    assert (out / "last.pt.corrupt").read_bytes() == (whole / "last.pt").read_bytes()

    (whole / "last-1.pt").write_bytes(b"")
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    project.fork(*flags(data, whole)).refused("last.pt", "last-1.pt", "--resume never")
    assert before == {path.name: path.read_bytes() for path in whole.iterdir()}


@SAME_FOR_BOTH
def test_any_damage_is_seen(project: Project, tmp_path: Path) -> None:
    """A bit turned over in each byte in turn, the archive's directory included; cut short anywhere.

    Without a look at the checksums some of these load, and are wrong. What nobody reads, such as
    the time at which a part was written, may be damaged.
    """
    found = project.call("checkpoints.damaged", tmp_path)
    assert False not in found["flipped"]
    assert {*found["cut"]} == {None}
    assert found["attribute"] is None
    # The first is read from memory that nobody wrote to, which may hold the right numbers.
    directory, tensor = found["unsealed"]
    assert directory is not None
    assert tensor is False


@SAME_FOR_BOTH
def test_what_is_no_file(project: Project, data: Path, tmp_path: Path) -> None:
    """A folder, or a pipe that nobody writes to, called last.pt; a .begun that is no text."""
    out = tmp_path / "out"
    project.alone(*flags(data, out, "--epochs", 2), draws=False).ok()
    (out / "last.pt").unlink()
    for make in (Path.mkdir, os.mkfifo):
        make(out / "last.pt")
        (out / ".begun").write_bytes(b"\xff\xfe")
        done = project.alone(*flags(data, out, "--epochs", 3), draws=False).ok()
        assert "last.pt: not a readable checkpoint (not a regular file); renamed to" in done.out
        assert re.search(r"last-1.pt: [12] of 3 epochs done", done.out)
        for name in ("last.pt", "best.pt"):
            (out / name).unlink()
        (out / "last.pt.corrupt").rename(out / make.__name__)


@SAME_FOR_BOTH
def test_two_runs_in_one_folder(project: Project, data: Path, tmp_path: Path) -> None:
    """The second is refused; once the first has been killed, it may begin at once."""
    mark, out = uuid.uuid4().hex, tmp_path / "out"
    first = start([project.folder / "launch.sh", *flags(data, out, "--epochs", 999)], mark)
    try:
        assert "starting 2 rank(s)" in first.stdout.readline()
        assert any("steps per epoch" in first.stdout.readline() for _ in range(2))
        project.alone(*flags(data, out)).refused(str(out), "another run", ".lock")
    finally:
        first.kill()
        done = finish(first, mark)  # once its ranks have saved
    assert not done.left
    project.alone(*flags(data, out), draws=False).ok()


@SAME_FOR_BOTH
def test_whatever_has_a_state_is_saved(project: Project, tmp_path: Path) -> None:
    """An average of the weights and a scaler, as an owner may add them to `Run(...)`."""
    assert project.call("checkpoints.more_parts", tmp_path) == [True, 32.0]


@SAME_FOR_BOTH
def test_a_disk_that_does_not_answer(project: Project, few: Path, tmp_path: Path) -> None:
    """One line that names the file, and the status of a failure, after which a job starts again."""
    words = flags(few, tmp_path)[:-4]
    statuses, said = project.call("resume.on_a_dead_disk", few, tmp_path, *words)
    assert statuses == [1, 1]
    (line,) = said.splitlines()
    assert re.fullmatch(r"error: .*\.jpg: the disk does not answer \(Stale file handle\)", line)
