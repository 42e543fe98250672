"""Gives each Python Apple's GPU, as device.cpp makes it up, once torch is imported.

torch calls it "apple", since a build of torch without "mps" has no place for another of that name.
Modules of the project and of ddpkit are read with the one name in place of the other.
"""

import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

sys.path.append(str(Path(__file__).parents[1]))
from after_torch import AfterTorch

sys.path.pop()


class Apple(ModuleType):
    """What torch.mps has, and no more, but for what torch asks every kind of device."""

    seeds: ClassVar[list[int]] = []

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def synchronize() -> None:
        pass

    @staticmethod
    def manual_seed(seed: int) -> None:
        Apple.seeds.append(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: object = None) -> object:
        import torch

        return torch.tensor(Apple.seeds[-1:])

    @staticmethod
    def set_rng_state(state: Any, device: object = None) -> None:
        Apple.seeds.append(int(state))

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False


def start() -> None:
    import torch

    torch.ops.load_library(os.environ["FAKE_APPLE"])
    torch.utils.rename_privateuse1_backend("apple")
    torch._register_device_module("apple", Apple("torch.apple"))


def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
    path = Path(self.get_filename(name))
    if "site-packages" not in path.parts:
        source = path.read_text()
        if '"mps"' in source:
            return compile(source.replace('"mps"', '"apple"'), path, "exec")
    return of_python(self, name)


of_python = SourceFileLoader.get_code
SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
sys.meta_path.insert(0, AfterTorch(start))
