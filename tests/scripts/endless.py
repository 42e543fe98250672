"""Ranks that add numbers from a loader worker, without end; they start in half of main.py's time.

For what holds and ends ranks under a debugger, which main.py has no part in.
"""

from ddpkit.ranks import process

if __name__ == "__main__":
    process.install_handlers()

from torch.utils.data import DataLoader, Dataset

from ddpkit.ranks import distributed, failures


class Numbers(Dataset):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> int:
        return index + 1


def main() -> None:
    distributed.setup()
    rank, local_rank = distributed.rank(), distributed.local_rank()  # noqa: F841  for breakpoints
    context, begin = process.worker_context(1), process.start_worker
    loader = DataLoader(
        Numbers(), num_workers=1, multiprocessing_context=context, worker_init_fn=begin
    )
    for number in loader:
        distributed.reduce_tensor(number)


if __name__ == "__main__":
    with failures.one_line_errors():
        main()
