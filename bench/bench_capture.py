"""What capture costs a training step: arms alternated block by block in one process.

On one thread: the reference job's tiny Llama (27 GEMM calls a step), and a two-layer Hugging Face
Llama (57 calls a step, attention among them) at several sizes. Arms: the job alone, capture waiting
for its steps (as before the recorded ones), capture recording, the same where its C++ part could
not be built, and the job after capture has taken itself out. A block is a few steps of one arm; the
first, which runs in the caches that the change of arms left, is not counted. Prints the ratio of
each arm's block to the lone job's, paired round by round.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gemmtune.capture import noting
from gemmtune.capture.ops import Recorder
from gemmtune.capture.session import Session
from gemmtune.job import steps
from gemmtune.llama.options import parse
from gemmtune.llama.parallel import Rank
from gemmtune.llama.train import Trainer
from gemmtune.stats import ratio_interval

ROUNDS = 40
BLOCK = 4
WAIT = {"steps": 1, "warmup": 10**9, "stop": False, "dims": False, "optimizer": None}
WAIT |= {"profile": False, "time": False, "backend": None}


def reference(tokens: int) -> Callable[[], None]:
    """A step of the reference job, as a function without arguments."""
    options = parse(
        [
            "--model",
            "tiny",
            "--device",
            "cpu",
            "--fsdp",
            "none",
            "--precision",
            "fp32",
            "--seq",
            str(tokens // 2),
        ]
    )
    trainer = Trainer(options, Rank(), torch.device("cpu"))
    count = iter(range(10**9))
    return lambda: trainer.step(next(count)) and None


def hugging_face(hidden: int, tokens: int) -> Callable[[], None]:
    """A step of a Hugging Face Llama."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 7 // 4,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1000,
            attn_implementation="eager",
            use_cache=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randint(0, 1000, (2, tokens // 2))

    def step() -> None:
        model(input_ids=data, labels=data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def waiting() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as out:
        session = Session(WAIT, out)
        yield
        session._handle.remove()
        session._done.set()


@contextmanager
def recording(load: Callable[[], Any] = noting.load) -> Iterator[None]:
    with patch.object(noting, "load", load):
        recorder = Recorder()
    handle = steps.on_step(lambda _: recorder.next_step())
    yield
    handle.remove()
    recorder.remove()


ARMS = {
    "alone": nullcontext,
    "waiting": waiting,
    "recording": recording,
    "in Python": partial(recording, lambda: None),
    "after": nullcontext,
}


def block(arm: str, step: Callable[[], None]) -> float:
    """Seconds of a step, the mean of a block without its first."""
    with ARMS[arm]():
        step()
        began = time.perf_counter()
        for _ in range(BLOCK - 1):
            step()
        return (time.perf_counter() - began) / (BLOCK - 1)


def main() -> None:
    torch.set_num_threads(1)
    noting.library()
    print(f"{'job':24} {'arm':10} {'ms a step (median)':>18} {'ratio to the job alone':>26}")
    for label, step in (
        ("tiny, 110 tokens", reference(110)),
        ("tiny, 160 tokens", reference(160)),
        ("tiny, 320 tokens", reference(320)),
        ("HF 64, 26 tokens", hugging_face(64, 26)),
        ("HF 128, 64 tokens", hugging_face(128, 64)),
        ("HF 256, 128 tokens", hugging_face(256, 128)),
        ("HF 512, 128 tokens", hugging_face(512, 128)),
    ):
        for arm in ARMS:
            block(arm, step)
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for _ in range(ROUNDS):
            for arm in random.sample(list(ARMS), len(ARMS)):
                seconds[arm].append(block(arm, step))
        for arm, values in seconds.items():
            line = f"{label:24} {arm:10} {sorted(values)[ROUNDS // 2] * 1e3:18.3f}"
            if arm != "alone":
                pairs = [v / a for v, a in zip(values, seconds["alone"], strict=True)]
                ratio = ratio_interval(pairs)
                line += f" {ratio.ratio:9.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
            print(line, flush=True)


if __name__ == "__main__":
    main()
