"""`gemmtune capture`: run a job and record its GEMMs."""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from gemmtune import __version__, regime, table, textfile
from gemmtune.capture import merge, noting, te_saved
from gemmtune.capture.ceiling import ceiling
from gemmtune.errors import JobError, UsageError
from gemmtune.job import launch
from gemmtune.nvml import POWER_CAP
from gemmtune.table import Shape

NAME_WIDTH = 72  # characters of a kernel's name that are shown

OPTIMIZER = "Class name of the optimizer whose steps count, where a job has several: AdamW."
JOB = click.argument("job", nargs=-1, type=click.UNPROCESSED, metavar="-- JOB…")
OUTPUT = click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("shapes.csv"),
    show_default=True,
    help="Table to write.",
)


@click.command(epilog="Example:  gemmtune capture -o shapes.csv -- python train.py --lr 1e-4")
@JOB
@OUTPUT
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Optimizer steps to record.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Optimizer steps to let pass first; 0 suits a job without an optimizer.",
)
@click.option("--stop", is_flag=True, help="End the job when the steps are recorded.")
@click.option("--dims", is_flag=True, help="Print each layer's input, weight and output sizes.")
@click.option("--optimizer", metavar="CLASS", help=OPTIMIZER)
@click.option(
    "--profile/--no-profile",
    default=None,
    help="Profile one more step: the largest kernels and the GEMMs' share.  [default: on a GPU]",
)
@click.option("--time", "timed", is_flag=True, help="On a GPU, time each call too.")
@click.option(
    "--backend",
    help="Whose library's calls to record on a GPU; cpu: torch's.  [default: the GPU's]",
)
def capture(
    job: tuple[str, ...],
    output: Path,
    steps: int,
    warmup: int,
    stop: bool,
    dims: bool,
    optimizer: str | None,
    profile: bool | None,
    timed: bool,
    backend: str | None,
) -> None:
    """Run a training job as it is and record the GEMMs of one step.

    JOB is any command that trains with torch: a script, python -m, torchrun, or one that spawns
    its ranks. Its output, arguments and exit code are its own; what is recorded goes to a table
    with a row per GEMM, pass and module. After the recorded steps nothing of gemmtune is left in
    the job.
    """
    options = {"steps": steps, "warmup": warmup, "stop": stop, "dims": dims, "optimizer": optimizer}
    library = _preload(backend)
    options |= {"profile": profile, "time": timed, "backend": library and library[0]}
    textfile.check_writable(output)  # better now than after the job
    if library is None:
        noting.prepare(lambda line: click.echo(f"gemmtune: {line}", err=True))
    with tempfile.TemporaryDirectory(prefix="gemmtune-") as out:
        path = library[1] if library else None
        code = launch.run(job, "gemmtune.capture.session:start", options, out, path)
        try:
            records = launch.read_ranks(out)
        except JobError as e:
            click.echo(f"gemmtune: {e}", err=True)
            note_elsewhere(job)
            sys.exit(code or e.exit_code)
        captured = merge.merge(records)
        captured.remarks.extend(te_saved.compare(out, [row.gemm for row in captured.rows]))
    first = records[0]
    provenance = {
        "stage": "capture",
        "version": __version__,
        "device": first["device"],
        "command": list(job),
        "ranks": captured.ranks,
        "ranks_per_node": first["local_world"],
        "threads": first["threads"],
        "torch": first["torch"],
        "step_us": captured.step_us,
        "steps": min(len(record["step_s"]) for record in records),
        **{k: first[k] for k in ("settings", "machine") if first[k]},
        **{k: v for k, v in (("gpu", captured.gpu), ("profile", captured.profile)) if v},
    }
    if not captured.rows:
        click.echo(f"gemmtune: nothing recorded: {_nothing(first, warmup)}", err=True)
        for line in captured.remarks:
            click.echo(f"gemmtune: {line}", err=True)
        sys.exit(code or 1)
    if not captured.profile and (profile or (profile is None and first["device"] != "cpu")):
        captured.remarks.append("no step was profiled: that takes one step after the recorded ones")
    try:
        table.write(output, captured.rows, Shape, provenance)
    except UsageError as e:  # a disk that filled up meanwhile; the job may have taken hours
        output = Path(tempfile.mkdtemp(prefix="gemmtune-")) / output.name
        table.write(output, captured.rows, Shape, provenance)
        click.echo(f"gemmtune: {e}: what was recorded is in {output}", err=True)
        code = code or e.exit_code
    if dims:
        from gemmtune.capture.dims import render

        click.echo(render(first["dims"]), err=True)
    for line in _summary(captured, output):
        click.echo(line, err=True)
    sys.exit(code)


def _preload(named: str | None) -> tuple[str, Path] | None:
    """The backend whose library's calls are to be caught, and what catches them."""
    from gemmtune.backends import base

    if named is not None:
        base.check_name(named)
    try:
        name = named or base.detect()
    except UsageError:  # a GPU that cannot be tuned here can be looked at all the same
        return None
    path = base.preload(name)
    return (name, path) if path is not None else None


def note_elsewhere(job: tuple[str, ...]) -> None:
    """Of a job that showed nothing: say where its Python is another than gemmtune's."""
    if why := launch.elsewhere(job):
        click.echo(f"gemmtune: {why}", err=True)


def _nothing(record: dict[str, object], warmup: int) -> str:
    if record["waited"] and not record["step_s"]:
        return (
            f"the job ended after {_count(record['waited'], 'optimizer step')}, and {warmup}"
            f" {'is' if warmup == 1 else 'are'} warm-up: let it run longer or lower --warmup"
        )
    graphs = "; of CUDA graphs they are seen at their capture alone: --warmup 0"
    return "no GEMM ran between the optimizer steps" + graphs * (record["device"] != "cpu")


def _count(number: object, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _flops(count: float) -> str:
    power = min(int(math.log10(max(count, 1)) // 3), 5)
    return f"{count / 1000**power:.4g} {('', 'k', 'M', 'G', 'T', 'P')[power]}FLOP"


def _summary(captured: merge.Captured, output: Path) -> list[str]:
    flops: dict[str, float] = {}
    for row in captured.rows:
        name = "recompute" if row.recompute else row.pass_
        weight = row.gemm.flops * row.calls * len(table.parse_ranks(row.ranks)) / captured.ranks
        flops[name] = flops.get(name, 0.0) + weight
    total = sum(flops.values()) or 1.0
    calls = table.by_gemm(captured.rows)
    lines = [
        f"gemmtune: {output}: {len(calls)} distinct GEMMs, {sum(calls.values()):g} calls a step"
        f" on each of {_count(captured.ranks, 'rank')}, {_flops(total)}: "
        + ", ".join(f"{name} {part / total:.0%}" for name, part in flops.items())
    ]
    said = (*_share(captured), *_power(captured.gpu), *_kernels(captured.profile))
    lines += [f"gemmtune: {line}" for line in (*said, *captured.remarks)]
    lines.append(f"gemmtune: next: gemmtune sweep {shlex.quote(str(output))}")
    return lines


def _share(captured: merge.Captured) -> Iterator[str]:
    """The GEMMs' share of the step, and the most that tuning could give."""
    most = ceiling(captured.rows)
    step_us, which = captured.step_us, "recorded"
    if not step_us:
        step_us, which = captured.profile.get("step_us", 0.0), "profiled"
    gemm_us = most.gemm_us if most else captured.profile.get("gemm_us", 0.0)
    if step_us and gemm_us:
        yield (
            f"GEMMs took {gemm_us / step_us:.0%} of the {which} step"
            f" ({gemm_us / 1e3:.4g} of {step_us / 1e3:.4g} ms)"
            + (
                "; if all ran at the best rate seen for their type, the step would be at most"
                f" {most.shorter(step_us):.1%} shorter"
                if most
                else ""
            )
        )


def _power(gpu: Mapping[str, Any]) -> Iterator[str]:
    """What the GPU drew, its clocks, and the regime that follows."""
    if not gpu:
        return
    (watts, low, high), sm_mhz = gpu["power_w"], gpu["sm_mhz"][0]
    cap = f" of its {gpu['power_cap_w']:.0f} W cap" if gpu["power_cap_w"] else ""
    drew = f"drew {watts:.0f} W ({low:.0f} to {high:.0f}){cap}" if watts else "tells no power"
    yield (
        f"the GPU {drew}, SM clock {sm_mhz:,.0f} MHz (boost {gpu['max_sm_mhz']:,.0f}),"
        f" {gpu['temperature_c'][0]:.0f} C: {_regime(gpu)}"
    )
    heat = {k: v for k, v in gpu["throttled"].items() if k != POWER_CAP and v > 0.1}
    for reason, share in heat.items():
        yield f"its clocks were held down ({reason}) in {share:.0%} of the readings: see to that"


def _regime(gpu: Mapping[str, Any]) -> str:
    if not gpu["regime"] and not (gpu["power_w"][0] and gpu["power_cap_w"]):
        return "whether the job runs at its power cap cannot be told"
    if not gpu["regime"]:
        return (
            f"{gpu['seconds']:.1f} s are too short to tell whether the job runs at its power cap:"
            " record more --steps"
        )
    some = f" on rank {gpu['ranks_at_cap']}" if "ranks_at_cap" in gpu else ""
    if gpu["regime"] == regime.AT_CAP:
        return f"the job runs at the power cap{some}, so candidates are ranked by sustained runs"
    beside = f" (at it{some})" if some else ""
    return f"the job runs below the power cap{beside}, so candidates are ranked by call time"


def _kernels(step: Mapping[str, Any]) -> Iterator[str]:
    """What one step was spent on."""
    if not step:
        return
    whole = step["step_us"]
    yield (
        f"one step profiled: {whole / 1e3:.4g} ms, GEMMs {step['gemm_us'] / whole:.0%}, idle"
        f" {1 - step['busy_us'] / whole:.0%}; the largest others:"
    )
    for name, us, calls in step["others"]:
        short = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."
        yield f"  {us / whole:6.1%}  {us / 1e3:8.4g} ms  {calls:5}x  {short}"
