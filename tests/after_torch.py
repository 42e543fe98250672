"""What the stand-ins for GPUs start in each Python, once torch is imported."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls `start` when torch has been imported, if it is put first into sys.meta_path."""

    def __init__(self, start: Callable[[], object]) -> None:
        self.start = start

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                sys.meta_path.remove(self)  # only now: a look for torch is no import
                load(module)
                self.start()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
