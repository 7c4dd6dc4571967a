"""What a run of the reference job measured, as a dict for JSON and as text. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from gemmtune.llama.options import Options
from gemmtune.llama.peak import find_peak


class Work(NamedTuple):
    """What one rank does in an optimizer step, as gemmtune.work() takes it."""

    tokens: int
    flops: int
    peak_flops: float | None


def step_work(options: Options, device_name: str) -> Work:
    """`peak_flops` is None where the table has no peak rate for the device in this precision."""
    config = options.config
    tokens = options.tokens * options.accumulate
    peak = find_peak(device_name) if options.precision != "fp32" else None
    rate = None if peak is None else peak.fp8 if options.fp8 else peak.bf16
    flops = tokens * config.flops_per_token(config.seq)
    return Work(tokens, flops, None if rate is None else rate * 1e12)


def summarise(
    options: Options,
    device_name: str,
    world: int,
    losses: Sequence[float],
    step_ms: Sequence[float],
    peak_bytes: int,
) -> dict[str, Any]:
    """The figures of a run.

    `losses` (means over the ranks) and `step_ms` are those of the timed steps; `peak_bytes` is the
    largest of any rank. Rates per rank are called per GPU. `mfu` is a fraction, None where the
    table has no peak rate for the device in this precision.
    """
    config = options.config
    work = step_work(options, device_name)
    seconds = sum(step_ms) / 1e3
    tokens_per_gpu = work.tokens * len(step_ms) / seconds
    tflops = work.flops * len(step_ms) / seconds / 1e12
    rate = None if work.peak_flops is None else work.peak_flops / 1e12
    return {
        "model": options.model,
        "layers": config.layers,
        "params": config.params,
        "device": device_name,
        "world": world,
        "fsdp": options.fsdp,
        "precision": options.precision,
        "te": options.te,
        "te_fp8": options.fp8,
        "checkpoint": options.checkpoint,
        "batch": options.batch,
        "seq": config.seq,
        "accumulate": options.accumulate,
        "seed": options.seed,
        "losses": list(losses),
        "step_ms": list(step_ms),
        "tokens_per_s_per_gpu": tokens_per_gpu,
        "tokens_per_s": tokens_per_gpu * world,
        "flops_per_token": config.flops_per_token(config.seq),
        "tflops_per_gpu": tflops,
        "peak_tflops": rate,
        "mfu": None if rate is None else tflops / rate,
        "peak_memory_bytes": peak_bytes,
    }


def text(figures: dict[str, Any], unit: str) -> str:
    """The figures as lines to read; `unit` is what a rank runs on: GPU or process."""
    f = figures
    size = f["params"] / 1e6
    params = f"{size:,.3g} million" if size < 1e3 else f"{size / 1e3:,.3g} billion"
    kind = "FP8" if f["te_fp8"] else "bf16"
    engine = f" + TE {kind}" if f["te"] else ""
    mfu = (
        "n/a (no peak rate for this device)"
        if f["mfu"] is None
        else f"{f['mfu']:.1%} of {f['peak_tflops']:,.1f} TFLOP/s ({kind}, dense)"
    )
    rows = {
        "model": f"{f['model']}, {f['layers']} layers, {params} parameters",
        "run": f"{f['world']} x {f['device']}, FSDP {f['fsdp']}, "
        f"precision {f['precision']}{engine}, "
        f"checkpoint {f['checkpoint']}",
        "step": f"{statistics.median(f['step_ms']):,.1f} ms (median of {len(f['step_ms'])}), "
        f"batch {f['batch']} x {f['seq']} tokens x {f['accumulate']} accumulated",
        "tokens/s": f"{f['tokens_per_s_per_gpu']:,.0f} per {unit}, {f['tokens_per_s']:,.0f} total",
        "TFLOP/s": f"{f['tflops_per_gpu']:,.3g} per {unit} "
        f"({f['flops_per_token']:.4g} FLOPs per token)",
        "MFU": mfu,
        "peak memory": f"{f['peak_memory_bytes'] / 2**30:.2f} GiB per {unit}",
    }
    return "\n".join(f"{name:<12} {value}" for name, value in rows.items())
