"""Calls a function as soon as a module has been imported, in a process that may never import it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gemmtune.job.files import complain


class AfterImport:
    """A finder that lets one module load as ever, then calls; at once where it is loaded.

    What the function raises costs the job nothing but a line on stderr. `remove()` stops waiting.
    """

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function = name, function
        if name in sys.modules:
            self._call(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        self.remove()  # so that the others are asked, and only once
        spec: ModuleSpec | None = None
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                break
        loader: Any = spec.loader if spec is not None else None
        if spec is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._call(module)

        loader.exec_module = exec_module
        return spec

    def _call(self, module: ModuleType) -> None:
        try:
            self.function(module)
        except Exception as error:
            complain(f"watching {self.name}", error)
