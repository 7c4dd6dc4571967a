"""Transformer Engine's GEMMs: which pass and module each of its calls of the library is for.

Runs inside the job. Transformer Engine calls the library itself, so torch's operators do not show
its GEMMs; but all of them pass one function of its extension module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

MODULE, FUNCTION = "transformer_engine_torch", "generic_gemm"
# By its arguments transa and transb, which tell the layout before FP8 makes all of them (T,N).
PASSES = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}


class Hook:
    """Tells `claim(pass, since(begin()))` of each GEMM of Transformer Engine, until `remove()`.

    `begin` and `since` are asked before and after the call. Does nothing where the job has not
    loaded Transformer Engine by now.
    """

    def __init__(
        self,
        claim: Callable[[str, Any], None],
        begin: Callable[[], Any],
        since: Callable[[Any], Any],
    ) -> None:
        self._module = sys.modules.get(MODULE)
        self._original = getattr(self._module, FUNCTION, None)
        original: Any = self._original

        def gemm(*args: Any, **kwargs: Any) -> Any:
            began = begin()
            result = original(*args, **kwargs)
            spent = since(began)
            claim(PASSES.get((bool(args[1]), bool(args[3])), "other"), spent)
            return result

        if original is not None:
            setattr(self._module, FUNCTION, gemm)

    def remove(self) -> None:
        if self._original is not None:
            setattr(self._module, FUNCTION, self._original)
