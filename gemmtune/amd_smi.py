"""What AMD's driver says of one GPU at this moment. Reads AMD SMI; holds nothing on the GPU.

By the Python package amdsmi, which ROCm brings (6.0 to 7); without it nothing is said at all, and
whatever a driver or a GPU does not answer, or answers with "N/A", is left out. Not asked is why the
GPU is held back: amdsmi_get_violation_status waits for a tenth of a second. Not yet run on an AMD
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gemmtune.nvml import Reading

MIB = 1 << 20


def read(uuid: str) -> Reading:
    """The GPU of that uuid (machine.Gpu.uuid: GPU- and 16 digits, as HIP has it). Never raises."""
    with _device(uuid) as ask:
        if ask is None:
            return Reading()
        memory = _numbers(ask("amdsmi_get_gpu_vram_usage"))
        processes = [p for p in ask("amdsmi_get_gpu_process_list") or () if isinstance(p, dict)]
        return _state(ask)._replace(
            free_bytes=int(memory.get("vram_total", 0) - memory.get("vram_used", 0)) * MIB,
            others=tuple(p["pid"] for p in processes if p.get("memory_usage", {}).get("vram_mem")),
        )


@contextmanager
def meter(uuid: str) -> Iterator[Callable[[], Reading] | None]:
    """As nvml.meter."""
    with _device(uuid) as ask:
        yield None if ask is None else lambda: _state(ask)


def _state(ask: Any) -> Reading:
    def first(name: str, *keys: str, of: str = "") -> float:
        known = _numbers(ask(name, of) if of else ask(name))
        return next((known[key] for key in keys if known.get(key)), 0.0)

    where = ("AmdSmiTemperatureType.HOTSPOT", "AmdSmiTemperatureMetric.CURRENT")
    watts = ("socket_power", "current_socket_power", "average_socket_power")
    ticks = first("amdsmi_get_energy_count", "energy_accumulator", "power")
    return Reading(
        sm_mhz=int(first("amdsmi_get_clock_info", "clk", "cur_clk", of="AmdSmiClkType.GFX")),
        power_w=first("amdsmi_get_power_info", *watts),
        temperature_c=int(_numbers({"t": ask("amdsmi_get_temp_metric", *where)}).get("t", 0)),
        power_cap_w=first("amdsmi_get_power_cap_info", "power_cap") / 1e6,
        max_sm_mhz=int(first("amdsmi_get_clock_info", "max_clk", of="AmdSmiClkType.GFX")),
        mem_mhz=int(first("amdsmi_get_clock_info", "clk", "cur_clk", of="AmdSmiClkType.MEM")),
        busy_percent=int(first("amdsmi_get_gpu_activity", "gfx_activity")),
        energy_j=ticks * first("amdsmi_get_energy_count", "counter_resolution") / 1e6,
    )


def _numbers(answer: Any) -> dict[str, float]:
    known = answer if isinstance(answer, dict) else {}
    return {k: v for k, v in known.items() if isinstance(v, int | float)}


@contextmanager
def _device(uuid: str) -> Iterator[Any]:
    """A function that asks AMD SMI about the GPU; None where there is no such GPU or no package."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
    except (Exception, SystemExit):  # no package, no library, no driver; it exits in some versions
        yield None
        return

    def call(name: str, *args: Any) -> Any:
        try:
            return getattr(amdsmi, name)(*args)
        except Exception:  # what one driver or one GPU does not answer, another may
            return None

    def value(name: str) -> Any:
        kind, _, member = name.partition(".")
        return getattr(getattr(amdsmi, kind, None), member, None)

    try:
        handles = call("amdsmi_get_processor_handles") or ()
        handle = next((h for h in handles if _is(h, uuid, call)), None)
        yield None if handle is None else lambda name, *of: call(name, handle, *map(value, of))
    finally:
        call("amdsmi_shut_down")


def _is(handle: Any, uuid: str, call: Any) -> bool:
    """By HIP's name for it; in versions before 6.4 by the serial number that this is made of."""
    if named := (call("amdsmi_get_gpu_enumeration_info", handle) or {}).get("hip_uuid"):
        return bool(named == uuid)
    serial = (call("amdsmi_get_gpu_asic_info", handle) or {}).get("asic_serial")
    try:
        return int(str(serial), 16) == int(uuid.removeprefix("GPU-"), 16)
    except ValueError:
        return False
