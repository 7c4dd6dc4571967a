"""Runs at the start of every Python process of a job that gemmtune launched.

Reads GEMMTUNE_JOB from the environment, and calls its entry as soon as the process has imported
torch. Whatever goes wrong here, the job goes on as it is, with one line on stderr. Imports nothing
that the interpreter has not loaded already, so that a process without torch starts as fast as ever.
"""

import os
import sys


class _AfterTorch:
    """A finder that lets torch load as ever, then starts gemmtune, once."""

    started = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.started:
            return None
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if not hasattr(loader, "exec_module"):
            return spec

        def exec_module(module):
            del loader.exec_module  # the class's own again
            loader.exec_module(module)
            self.start()

        loader.exec_module = exec_module
        return spec

    def start(self):
        if self.started:
            return
        self.started = True
        try:
            import importlib
            import json

            job = json.loads(os.environ["GEMMTUNE_JOB"])
            _package("gemmtune", job["package"])
            module, function = job["entry"].split(":")
            getattr(importlib.import_module(module), function)(job["options"], job["out"])
        except Exception as error:
            text = " ".join(str(error).split())
            line = f"gemmtune: {type(error).__name__}: {text}: the job goes on as it is"
            print(line, file=sys.stderr, flush=True)


def _package(name, init):
    """Import a package from its file alone, so that nothing beside it shadows the job's."""
    if name in sys.modules:
        return
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[os.path.dirname(init)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _chain():
    """Hand over to the sitecustomize that this one hides; without one, be none either."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if not p or os.path.abspath(p) != here]
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except BaseException:
        # Python's site module passes over a missing sitecustomize (ImportError of that name) and
        # reports any other fault, so either comes out as it would have without gemmtune.
        sys.modules[__name__] = ours
        raise


if "GEMMTUNE_JOB" in os.environ:
    _after = _AfterTorch()
    sys.meta_path.insert(0, _after)
    if "torch" in sys.modules:  # a .pth file was faster
        _after.start()
_chain()
