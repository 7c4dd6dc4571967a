"""What capture costs a training step: arms alternated step by step in one process.

A Hugging Face Llama on one thread, at several step times. Arms: the job alone, capture waiting for
its steps (as before and between recordings), capture recording, and the job after capture has taken
itself out. Prints the ratio of each arm's step to the lone job's, paired round by round.
"""

import os
import random
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gemmtune.capture.ops import Recorder
from gemmtune.capture.session import Session
from gemmtune.job import steps
from gemmtune.stats import ratio_interval

ROUNDS = 150
SIZES = {"hidden 64, 26 tokens": (64, 13), "hidden 128, 64 tokens": (128, 32)}
SIZES["hidden 256, 128 tokens"] = (256, 64)
WAIT = {"steps": 1, "warmup": 10**9, "stop": False, "dims": False, "optimizer": None}


def job(hidden: int, tokens: int):
    """A step of training, as a function without arguments."""
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
    data = torch.randint(0, 1000, (2, tokens))

    def step() -> None:
        model(input_ids=data, labels=data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def waiting(step) -> float:
    with tempfile.TemporaryDirectory() as out:
        session = Session(WAIT, out)
        seconds = timed(step)
        session._handle.remove()
        session._done.set()
    return seconds


def recording(step) -> float:
    recorder = Recorder()
    handle = steps.on_step(lambda _: recorder.next_step())
    seconds = timed(step)
    handle.remove()
    recorder.remove()
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    arms = {"job alone": timed, "waiting": waiting, "recording": recording, "after": timed}
    print(f"{'step':24} {'arm':10} {'ms (median)':>12} {'ratio to the job alone':>30}")
    for label, (hidden, tokens) in SIZES.items():
        step = job(hidden, tokens)
        for arm in (timed, recording, waiting, timed):
            arm(step)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(ROUNDS):
            for name in random.sample(list(arms), len(arms)):
                seconds[name].append(arms[name](step))
        for name, values in seconds.items():
            line = f"{label:24} {name:10} {sorted(values)[ROUNDS // 2] * 1e3:12.3f}"
            if name != "job alone":
                pairs = [v / a for v, a in zip(values, seconds["job alone"], strict=True)]
                ratio = ratio_interval(pairs)
                line += f" {ratio.ratio:12.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
            print(line)


if __name__ == "__main__":
    main()
