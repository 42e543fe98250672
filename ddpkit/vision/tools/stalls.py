"""Finds the lines of a training step that make the device wait, for the tests of a project.

A step is taken on device meta, whose tensors have no values. Who asks for one gets a 1.
"""

import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import ddpkit
from ddpkit.data import loading, normalizing
from ddpkit.run.loop import Passes

CPU = torch.device("cpu")
META = torch.device("meta")
STEPS = 2
# steps taken before these: a prime, because some things are done every so many
BEFORE = 101


def find(main: ModuleType, words: Sequence[str]) -> str:
    """Return which line reads a value off the device in each step, and why that is slow; or "".

    main: main.py, of which `main.main(words)` takes two optimizer steps, and writes nothing. What
    is read in one of them alone may be read: it is read now and then.
    """
    root = Path(str(main.__file__)).parent
    reads = Reads(root)
    main.ddp.setup(0, main.parse_args(words))
    try:
        with ExitStack() as stack:
            for place, name, stand_in in stand_ins(main, reads):
                stack.enter_context(patch.object(place, name, stand_in))
            stack.enter_context(reads)
            main.main(words)
    except (RuntimeError, TypeError) as error:
        places = [*traceback.walk_tb(error.__traceback__)]
        place = own_line(places[::-1], root)
        if not place or not reads.step:
            raise  # of another kind
        return (
            f"{place}\nreads a value off the device, or has a size that depends on one "
            f"({error})"
        )
    finally:
        torch.distributed.destroy_process_group()
    for place, steps in reads.found.items():
        if len(steps) == STEPS:
            return (
                f"{place}\nreads a value off the device in each step: the device waits"
            )
    return ""


class Reads(TorchDispatchMode):
    """Notes the lines of the files in `root` that ask for values, by step."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.step = 0  # 0: outside of any
        self.found: dict[str, set[int]] = {}

    def note_reader(self) -> None:
        if self.step:
            place = own_line(traceback.walk_stack(None), self.root)
            self.found.setdefault(place, set()).add(self.step)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if source is not None and source.device == META:
            if name == "_local_scalar_dense":  # item(), float(), if
                self.note_reader()
                return torch.ones((), dtype=source.dtype).item()
            target = torch.device(kwargs.get("device") or META)
            if name == "_to_copy" and target == CPU:  # cpu(), to("cpu"), tolist()
                if not kwargs.get("non_blocking"):
                    self.note_reader()
                return torch.ones_like(source, device=CPU, dtype=kwargs.get("dtype"))
        return func(*args, **kwargs)

    def shown(self, show: Callable[..., str]) -> Callable[..., str]:
        """Return what shows a tensor, which would read its values if there were some."""

        def noted(tensor: Tensor, *args: object, **options: object) -> str:
            if tensor.device != META:
                return show(tensor, *args, **options)
            self.note_reader()
            return "1"

        return noted


class Alone(nn.Module):
    """In place of DistributedDataParallel, which does not know device meta."""

    def __init__(self, module: nn.Module, *args: object, **options: object) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **options: object) -> object:
        return self.module(*args, **options)

    no_sync = nullcontext


def stand_ins(main: ModuleType, reads: Reads) -> Iterator[tuple[object, str, object]]:
    """Yield what is replaced: where, its name, and by what."""
    run = MagicMock(epoch=0, step=BEFORE, is_logged=False)
    run.end_epoch.return_value = False
    run.is_out_of_patience.side_effect = [False, True]

    def add_scalar(name: str, value: object, *_: object) -> None:
        torch.as_tensor(value).item()  # as TensorBoard's does

    run.writer.add_scalar.side_effect = add_scalar

    def make_run(
        folder: object,
        loader: DataLoader,
        val_loader: object,
        classes: Sequence[str],
        **parts: int,
    ) -> object:
        def take_steps(*networks: object) -> Iterator[tuple[int, Passes]]:
            batches = iter(loader)
            format = normalizing.format_of(loader)
            for step in range(STEPS):
                some = list(islice(batches, parts["accumulate"]))
                reads.step += 1
                yield step, Passes(some, META, format)
                run.step += 1
            reads.step = 0

        run.steps.side_effect = take_steps
        run.classes = classes
        return run

    # which main.py calls before there is a Run
    vars(make_run)["steps_per_epoch"] = ddpkit.Run.steps_per_epoch
    yield main.ddp, "setup", lambda *_: META
    yield torch.distributed, "all_reduce", lambda *_, **__: None
    yield ddpkit, "RunFolder", lambda *_: MagicMock(state=None)
    yield ddpkit, "Run", make_run
    in_this_process = loading.workers(0, CPU)
    yield loading, "workers", lambda *_: dict(in_this_process)
    name = "DistributedDataParallel"
    for module in (main, torch.nn.parallel):  # however main.py imports it
        if hasattr(module, name):
            yield module, name, Alone
    for name in ("__repr__", "__format__"):
        yield Tensor, name, reads.shown(getattr(Tensor, name))


def own_line(places: Iterable[tuple[FrameType, int]], root: Path) -> str:
    """Return the line of the first file in `root`, as "main.py:7: text"; "" if there is none."""
    for frame, number in places:
        path = Path(frame.f_code.co_filename)
        if path.parent == root:
            text = linecache.getline(str(path), number).strip()
            return f"{path.name}:{number}: {text}"
    return ""
