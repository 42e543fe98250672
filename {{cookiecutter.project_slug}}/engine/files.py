"""Files and folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.distributed import UserError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Give the block a path beside `path` to write to, then rename it to `path`.

    Whatever stops the block, `path` is the old file or the new one, never a part. A failed write
    is a UserError.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by RuntimeError
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise UserError(f"{path}: cannot be written ({reason})") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Give the block an empty folder to fill, then rename it to `folder`.

    An interrupted block leaves no `folder`. Where another process was first, its work stays.
    """
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        with contextlib.suppress(OSError):
            partial.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
