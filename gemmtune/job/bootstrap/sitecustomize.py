"""Runs at the start of every Python process of a job that gemmtune launched.

Reads GEMMTUNE_JOB from the environment, and calls its entry as soon as the process has imported
torch. Whatever goes wrong here, the job goes on as it is, with one line on stderr.
"""

import importlib.util
import json
import os
import sys


def _chain():
    """Import the sitecustomize that this one hides, if any."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def _package(name, init):
    """Import a package from its file alone, so that nothing beside it shadows the job's."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, init, submodule_search_locations=[os.path.dirname(init)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _start(job):
    try:
        _package("gemmtune", job["package"])
        module, function = job["entry"].split(":")
        getattr(importlib.import_module(module), function)(job["options"], job["out"])
    except Exception as error:
        print(
            f"gemmtune: {type(error).__name__}: {error}: the job goes on as it is", file=sys.stderr
        )


class _AfterTorch:
    """A finder that lets torch load as ever, then starts gemmtune; gone after that."""

    def __init__(self, job):
        self.job = job

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _start(self.job)

        spec.loader.exec_module = exec_module
        return spec


_chain()
if "GEMMTUNE_JOB" in os.environ:
    try:
        sys.meta_path.insert(0, _AfterTorch(json.loads(os.environ["GEMMTUNE_JOB"])))
    except ValueError as error:
        print(f"gemmtune: GEMMTUNE_JOB is not JSON ({error}): ignored", file=sys.stderr)
