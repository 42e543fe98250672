"""Starts emulate.py in each Python of a machine with made-up GPUs, once torch is imported."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                sys.meta_path.remove(self)  # only now: a look for torch is no import
                load(module)
                import emulate

                emulate.start()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterTorch())
