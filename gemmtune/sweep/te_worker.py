"""A process in which Transformer Engine launches GEMMs: one choice of TE's, fixed by its variables.

    python -m gemmtune.sweep.te_worker once DEVICE SEED GEMM…    each Gemm (a JSON list) once
    python -m gemmtune.sweep.te_worker serve DEVICE FD GEMM      what is asked for on a socket

The environment says what TE does (TE_HIPBLASLT_*). A `once` process draws its own operands, prints
what TE prints, and ends in order: TE writes its file when the process ends, and not if it is
killed. A `serve` process is handed operands that share memory with its parent's.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing

from gemmtune.backends.base import Operands
from gemmtune.backends.lt import queued_us
from gemmtune.backends.te_call import Call
from gemmtune.gemm import Gemm
from gemmtune.sweep import operands

HOST_US = 60.0  # that Python and TE take at most to hand over one launch


def once(device: str, seed: int, gemms: list[Gemm]) -> None:
    """Launch each Gemm once, on operands of its own: an accumulating one adds to scratch memory."""
    for gemm in gemms:
        call = Call(gemm)
        drawn = operands.draw(gemm, seed, device)
        call.run(call.prepare(drawn), drawn)
        if device != "cpu":
            torch.cuda.synchronize()


def serve(device: str, pipe: Connection, gemm: Gemm) -> None:
    """Answer until the pipe closes: (None, value), or (what went wrong, None)."""
    call = Call(gemm)
    bound: list[tuple[Operands, Callable[[], Any]]] = []
    pipe.send((None, "here"))
    while True:
        try:
            word, value = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = None
            if word == "bind":
                bound.append((value, call.prepare(value)))
            elif word == "run":
                call.run(bound[value][1], bound[value][0])
            else:
                answer = _time_us(device, [bound[i][1] for i in value])
            if device != "cpu":
                torch.cuda.synchronize()
            pipe.send((None, answer))
        except Exception as e:
            text = str(e).strip().splitlines() or [type(e).__name__]
            pipe.send((text[0][:200], None))


def _time_us(device: str, launches: list[Callable[[], Any]]) -> float:
    """Mean microseconds of launches back to back; on a GPU by events."""
    if device == "cpu":
        start = time.perf_counter_ns()
        for launch in launches:
            launch()
        return (time.perf_counter_ns() - start) / len(launches) / 1e3
    return queued_us(launches, 0.0, HOST_US)[0]


def _die_with(parent: int) -> None:
    """A launch that hangs must not outlive the sweep that gave it up."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(words: list[str]) -> None:
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    mode, device, number, *gemms = words
    asked = [Gemm(*json.loads(text)) for text in gemms]
    if device != "cpu":
        torch.cuda.set_device(0)
    if mode == "once":
        once(device, int(number), asked)
    else:
        torch.multiprocessing.set_sharing_strategy("file_system")
        serve(device, Connection(int(number)), asked[0])


if __name__ == "__main__":
    main(sys.argv[1:])
