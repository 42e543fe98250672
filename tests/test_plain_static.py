"""engine.check.lockstep: collectives that not all ranks reach, found by reading code."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from running import ROOT, TEMPLATE_FOLDER

from engine.check import lockstep

FOLDER = ROOT / TEMPLATE_FOLDER
# "# found" stands at each line in which a collective is found that not all ranks reach.
SNIPPETS = {
    "if": (
        """
        if rank == 0:
            distributed.reduce_tensor(x)  # found
        if not distributed.is_rank_zero():
            dist.barrier()  # found
        if args.local_rank == 0 and epoch > 3: loss.backward()  # found
        if int(os.environ["RANK"]) == 0:
            torch.distributed.all_reduce(x)  # found
        if os.environ.get("SLURM_PROCID") == "0":
            dist.gather(x)  # found
        """
    ),
    "else": (
        """
        if rank:
            pass
        elif ready:
            dist.broadcast(x, src=0)  # found
        else:
            run.end_step()  # found
        """
    ),
    "same on both sides": (
        """
        if rank == 0:
            dist.broadcast_object_list(box, src=0)
        else:
            box = [None]
            dist.broadcast_object_list(box, src=0)
        if rank == 0:
            dist.gather(x, parts)
            dist.barrier()  # found
        elif rank > 0:
            dist.gather(x)
        if rank == 0:
            dist.gather_object(x, parts)
        elif rank > 0:
            dist.gather_object(x)
        if rank == 0:
            dist.all_reduce(x)  # found
            dist.broadcast(x, 0)
        elif first:
            dist.broadcast(y, 0)
        else:
            dist.broadcast(z, 0)
        """
    ),
    "in turns": (
        """
        if rank > 0:
            dist.barrier()
        load()
        if rank == 0:
            dist.barrier()
        """
    ),
    "not about which rank": (
        """
        if local_rank != -1 and world_size > 1 and rank is not None and rank >= 0:
            dist.barrier()
        if "RANK" in os.environ:
            dist.barrier()
        for _ in range(world_size):
            dist.barrier()
        ranked = x.gather(1, y) if rank == 0 else torch.save(z) or plt.broadcast()
        if rank == 0:
            wandb_run.save(path)
            total = ratio.compute()
        """
    ),
    "part of the ranks": (
        """
        if rank in members:
            dist.all_reduce(x, group=pair)
            dist.barrier(my_group)
            dist.all_reduce(x, group=None)  # found
            dist.new_group(members, pg)  # found
        """
    ),
    "expressions": (
        """
        total = distributed.reduce_tensor(x) if rank == 0 else None  # found
        is_first and dist.barrier()
        rank == 0 and ready and dist.barrier()  # found
        while rank > n:
            dist.barrier()  # found
        for _ in range(rank):
            dist.barrier()  # found
        match rank:
            case 0:
                dist.barrier()  # found
            case _:
                pass
        match rank:
            case 0:
                dist.broadcast(x, 0)
            case _:
                dist.broadcast(y, 0)
        """
    ),
    "variables": (
        """
        import torchmetrics
        writes = distributed.rank() == 0
        self.active = writes
        if writes:
            dist.barrier()  # found
        if not self.active or self.later:
            metrics.compute()  # found
        is_later = self.later
        if is_later:
            dist.barrier()  # found
        self.later = writes
        if not self.active:
            metrics.compute()  # found
        def inner():
            if writes and ready:
                dist.barrier()  # found
        def other(writes_more):
            if writes_more:
                dist.barrier()
        """
    ),
    "ddp": (
        """
        model = DistributedDataParallel(model)
        self.net = engine.wrap(model, device)
        if rank == 0:
            model(images)  # found
            self.net(images)  # found
            self.ddp_model(images)  # found
            bare(images)
            self.ddp_model.eval()
        """
    ),
    "the door of engine": (
        """
        import engine
        if engine.rank() == 0:
            device = engine.setup(0)  # found
            for images, *_ in engine.batches(loader, device):  # found
                pass
            for i, batch in run.batches():  # found
                loss = run.loss(loss_sum, count)  # found
            loader.batches()
            engine.say(engine.zeros(1))
            folder.find_checkpoint()  # found
        """
    ),
    "functions of the file": (
        """
        def total(x):
            return distributed.reduce_tensor(x)
        def both(x):
            if rank == 0:
                print(total(x))  # found
        def bare(x):
            if rank == 0:
                def later():
                    dist.barrier()
                other.total(x)
        """
    ),
    "return": (
        """
        def f():
            with block():
                if rank != 0:
                    return
                write()
            dist.barrier()  # found
        def g():
            if rank != 0:
                dist.barrier()
                return
            write()
            dist.barrier()
        def h():
            if rank == 0:
                def early():
                    return
                raise ValueError
            dist.barrier()
        """
    ),
    "break and continue": (
        """
        for x in loader:
            loss = net(x)
            loss.backward()  # found
            if rank == 0 and late:
                continue
            for y in x:
                if rank == 1: break
            dist.barrier()  # found
            if step > 100 and is_main_process():
                break
        for x in loader:
            if rank == 0:
                for y in x:
                    break
            dist.barrier()
        """
    ),
    "raise": (
        """
        try:
            if rank == 0:
                raise OSError
            dist.barrier()  # found
        except OSError:
            pass
        dist.barrier()
        """
    ),
    "except": (
        """
        try:
            import apex
            step()
        except ImportError:
            dist.barrier()
        except RuntimeError:
            dist.barrier()  # found
        finally:
            dist.barrier()
        for x in loader:
            try:
                net(next(items)).backward()
            except StopIteration:
                break
            try:
                net(y).backward()  # found
            except torch.OutOfMemoryError:
                continue
            try:
                net(y).backward()
            except RuntimeError:
                raise
        """
    ),
    "not finite": (
        """
        def own():
            for x in loader:
                loss = net(x)
                if not torch.isfinite(loss):
                    continue
                loss.backward()  # found
        def agreed():
            for x in loader:
                loss = net(x)
                bad = distributed.reduce_tensor(loss.isnan(), "max")
                if bad or loss.isnan():
                    continue
                loss.backward()
        def fatal():
            if loss.isnan():
                raise ValueError
            loss.backward()
        """
    ),
    "what one rank runs": (
        """
        distributed.from_rank_zero(lambda: distributed.gather(x))  # found
        distributed.from_rank(3, dist.barrier)  # found
        distributed.from_rank_zero(read, distributed.gather(x))
        with distributed.rank_zero_first():
            dist.barrier()  # found
        """
    ),
    "switched off": (
        """
        if rank == 0:
            dist.barrier()  # lockstep: ok
        if rank == 0:  # the others are in turn(); lockstep: ok
            dist.barrier()
        if rank == 0:
            dist.broadcast(
                x,
                src=0,
            )  # lockstep: ok
        if rank == 0:
            dist.barrier()  # lockstep  # found
        """
    ),
}
# A line of main.py, what is planted below it with its indentation, and where that is found: in
# which line, which collective.
PLANTED = [
    ("outputs = ddp_model(", "if rank == 0: engine.reduce_tensor(x)", "if rank", "reduce_tensor"),
    ("outputs = ddp_model(", "if engine.rank() == 0: ddp_model(x)", "ddp_model(x)", "ddp_model"),
    ("outputs = ddp_model(", "args.local_rank and dist.gather(x)", "gather(x)", "gather"),
    ("loss_sum, count = cri", "if rank == 0: run.loss(x, 1)", "run.loss(x", "loss"),
    ("run.save()", "if ready or engine.rank(): engine.wrap(model)", "if ready", "wrap"),
    ("run.save()", "is_0 = engine.rank() == 0\n{0}if is_0: run.save()", "if is_0", "save"),
    ("results, found = judge(", "x = metrics.compute() if rank == 0 else 1", "x = met", "compute"),
    ("results, found = judge(", "x = engine.compute(x) if rank else 1", "x = engine", "compute"),
    ("results, found = judge(", "rank and print(*run.batches())", "rank and print", "batches"),
    ("device = engine.setup(", "for _ in range(rank): dist.barrier()", "range(", "barrier"),
    ("folder.load(", "if rank > 0:\n{0}    return", "train(args, folder", "train (shard)"),
    ("scaler = torch", "if rank > 0:\n{0}    return", "run = engine.Run(", "Run"),
    ("run.divide_gradients(", "if rank == 0:\n{0}    continue", "run.end_step()", "end_step"),
    ("run.loss(", "if loss_sum.isnan():\n{0}    break", "outputs = ddp_model(", "ddp_model"),
    ("engine.start(main)", "if rank == 0: train(*all)", "train(*all)", "train (shard)"),
]


def lines_with(mark: str, source: str) -> list[int]:
    return [number for number, line in enumerate(source.split("\n"), 1) if mark in line]


def lines_found(source: str) -> list[int]:
    return [int(line.split(":")[0]) for line in lockstep.check(source)]


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets(name: str) -> None:
    source = textwrap.dedent(SNIPPETS[name])
    assert lines_found(source) == lines_with("# found", source), lockstep.check(source)


@pytest.mark.parametrize(("below", "planted", "place", "name"), PLANTED)
def test_planted_faults(below: str, planted: str, place: str, name: str) -> None:
    source = (FOLDER / "main.py").read_text()
    head, line, tail = re.split(f"(.*{re.escape(below)}.*\n)", source, maxsplit=1)
    indent = " " * (len(line) - len(line.lstrip()))
    source = head + line + indent + planted.format(indent) + "\n" + tail
    (found,) = lockstep.check(source)
    number, _, text = found.split(":", 2)
    assert int(number) in lines_with(place, source), found
    assert text.startswith(f" {name}"), found


def run(*files: object) -> subprocess.CompletedProcess[str]:
    """Run it without any installed package, as pre-commit does."""
    command = [sys.executable, "-S", "-m", "engine.check.lockstep", *map(str, files)]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60)


def test_both_projects_are_clean() -> None:
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "lockstep: ok" in (FOLDER / "engine/ranks/distributed.py").read_text()


def test_lines_and_status(tmp_path: Path) -> None:
    bad, worse, odd = (tmp_path / name for name in ("bad.py", "worse.py", "odd.py"))
    bad.write_text("if rank == 0:\n    é = dist.all_reduce(x)\n", encoding="utf-8")
    done = run(bad)
    assert done.returncode == 1
    assert done.stdout == (
        f"{bad}:2:9: all_reduce runs on some ranks only (`if rank == 0`, line 1): "
        "it would wait forever; move it out of the if\n"
    )
    # As "lint" in tasks.json reads it.
    assert re.fullmatch(r"(.+\.py):(\d+):(\d+): (.+)", done.stdout.strip())
    worse.write_text("if rank == 0\n")
    odd.write_bytes(b"# \xff\n")
    done = run(worse, odd, tmp_path / "none.py", bad)
    assert done.returncode == 2
    first, second, third, last = done.stdout.splitlines()
    assert first == f"{worse}:1:13: cannot be read: expected ':'"
    assert second.startswith(f"{odd}:1:1: cannot be read: ")
    assert third.endswith("none.py:1:1: cannot be read: No such file or directory")
    assert "all_reduce" in last
    assert not done.stderr
