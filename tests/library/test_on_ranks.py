"""The decorator that runs a test on ranks."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from generated import ROOT, run
from ranks import on_ranks

from ddpkit.ranks import distributed


@on_ranks(1, 2, 3)
def test_a_sum_over_ranks() -> None:
    ranks = distributed.world_size()
    found = distributed.reduce_tensor(torch.tensor(distributed.rank()))
    assert found == ranks * (ranks - 1) // 2


def test_a_failure_on_one_rank() -> None:
    @on_ranks(2)
    def fails() -> None:
        assert distributed.rank() == 0, "not rank 0"

    with pytest.raises(
        pytest.fail.Exception, match=r"rank 1 of 2, status 1:(.|\n)*not rank 0"
    ):
        fails()


def test_a_fork_has_a_thread_pool_of_its_own(tmp_path: Path) -> None:
    """torch has each thread replace its parent's, and aborts if two do so at once.

    A compiled network's backward pass starts threads, here while a pool is slowly made.
    """
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    slow = tmp_path / "slow.c"
    slow.write_text("""
        #include <dlfcn.h>
        #include <unistd.h>
        void *pthreadpool_create(unsigned long threads) {
            void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
            void *(*create)(unsigned long) = dlsym(torch, "pthreadpool_create");
            usleep(100000);
            return create(threads);
        }
    """)
    library = tmp_path / "slow.so"
    run(["gcc", "-shared", "-fPIC", "-o", library, slow, "-ldl"]).ok()
    script = tmp_path / "script.py"
    script.write_text("""if True:
        import sys
        import ranks
        import torch

        def act():
            net = torch.compile(torch.nn.Linear(2, 2), backend="eager")
            net(torch.ones(1, 2)).sum().backward()

        torch.get_num_threads()  # as tests of this process may have had done
        sys.exit(ranks.wait([ranks.fork(act, sys.argv[1])])[0])
    """)
    env = {"LD_PRELOAD": str(library), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    run([sys.executable, script, tmp_path / "said"], **env).ok()
