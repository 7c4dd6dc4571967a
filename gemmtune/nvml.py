"""What the NVIDIA driver says of one GPU at this moment. Reads NVML; holds nothing on the GPU.

Whatever a driver or a GPU does not answer is left out; without NVML nothing is said at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# nvml.h: nvmlClocksEventReasons; idle (1) and a user's own clock setting (2) throttle nothing.
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
}


class Reading(NamedTuple):
    """One moment. 0 and () where the driver does not say."""

    sm_mhz: int = 0
    power_w: float = 0.0
    temperature_c: int = 0
    throttled: tuple[str, ...] = ()  # values of THROTTLES
    free_bytes: int = 0
    others: tuple[int, ...] = ()  # processes that hold memory on the GPU; numbers as the host has


def read(uuid: str) -> Reading:
    """The GPU of that uuid (machine.Gpu.uuid). Never raises."""
    with _device(uuid) as ask:
        if ask is None:
            return Reading()
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
        memory = ask("nvmlDeviceGetMemoryInfo")
        return Reading(
            sm_mhz=ask("nvmlDeviceGetClockInfo", 1) or 0,  # NVML_CLOCK_SM
            power_w=(ask("nvmlDeviceGetPowerUsage") or 0) / 1000,
            temperature_c=ask("nvmlDeviceGetTemperature", 0) or 0,  # NVML_TEMPERATURE_GPU
            throttled=tuple(name for bit, name in THROTTLES.items() if reasons & bit),
            free_bytes=memory.free if memory else 0,
            others=tuple(p.pid for p in ask("nvmlDeviceGetComputeRunningProcesses") or ()),
        )


@contextmanager
def _device(uuid: str) -> Iterator[Any]:
    """A function that asks NVML about the GPU; None where there is no such GPU or no NVML."""
    try:
        import pynvml as nv

        nv.nvmlInit()
    except Exception:  # no package, no library, no driver, or not the driver's version
        yield None
        return
    try:
        try:
            handle = nv.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:
            yield None
            return

        def ask(call: str, *args: Any) -> Any:
            try:
                return getattr(nv, call)(handle, *args)
            except Exception:  # what one driver or one GPU does not answer, another may
                return None

        yield ask
    finally:
        nv.nvmlShutdown()
