"""What the NVIDIA driver says of one GPU at this moment. Reads NVML; holds nothing on the GPU.

Whatever a driver or a GPU does not answer is left out; without NVML nothing is said at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# nvml.h: nvmlClocksEventReasons; idle (1) and a user's own clock setting (2) throttle nothing.
POWER_CAP = "power cap"
THROTTLES = {
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
}
_SM, _MEM = 1, 2  # nvmlClockType_t


HELD = 0.95  # of the highest clock: an H200 trains Llama at 1,320 to 1,590 of 1,980 MHz at its cap


class Reading(NamedTuple):
    """One moment. 0 and () where the driver does not say."""

    sm_mhz: int = 0
    power_w: float = 0.0
    temperature_c: int = 0
    throttled: tuple[str, ...] = ()  # values of THROTTLES
    free_bytes: int = 0
    others: tuple[int, ...] = ()  # processes that hold memory on the GPU; numbers as the host has
    power_cap_w: float = 0.0  # the one in force
    max_sm_mhz: int = 0
    mem_mhz: int = 0
    busy_percent: int = 0  # of the time in which some kernel ran, of the driver's last period
    energy_j: float = 0.0  # since the driver was loaded; moves in ticks of about 0.1 s

    @property
    def capped(self) -> bool:
        """Whether the power cap holds the clocks down by an amount that matters.

        An H200 names it as its reason at 434 W of 700 too, 3 % below its highest clock.
        """
        held = not (self.sm_mhz and self.max_sm_mhz) or self.sm_mhz < HELD * self.max_sm_mhz
        return POWER_CAP in self.throttled and held


def read(uuid: str) -> Reading:
    """The GPU of that uuid (machine.Gpu.uuid). Never raises."""
    with _device(uuid) as ask:
        if ask is None:
            return Reading()
        memory = ask("nvmlDeviceGetMemoryInfo")
        return _state(ask)._replace(
            free_bytes=memory.free if memory else 0,
            others=tuple(p.pid for p in ask("nvmlDeviceGetComputeRunningProcesses") or ()),
        )


@contextmanager
def meter(uuid: str) -> Iterator[Callable[[], Reading] | None]:
    """A function that reads the GPU of that uuid again and again, without free_bytes and others,
    which take longest; None where there is no such GPU or no NVML."""
    with _device(uuid) as ask:
        yield None if ask is None else lambda: _state(ask)


def _state(ask: Any) -> Reading:
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
    rates = ask("nvmlDeviceGetUtilizationRates")
    return Reading(
        sm_mhz=ask("nvmlDeviceGetClockInfo", _SM) or 0,
        power_w=(ask("nvmlDeviceGetPowerUsage") or 0) / 1000,
        temperature_c=ask("nvmlDeviceGetTemperature", 0) or 0,  # NVML_TEMPERATURE_GPU
        throttled=tuple(name for bit, name in THROTTLES.items() if reasons & bit),
        power_cap_w=(ask("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1000,
        max_sm_mhz=ask("nvmlDeviceGetMaxClockInfo", _SM) or 0,
        mem_mhz=ask("nvmlDeviceGetClockInfo", _MEM) or 0,
        busy_percent=rates.gpu if rates else 0,
        energy_j=(ask("nvmlDeviceGetTotalEnergyConsumption") or 0) / 1000,
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
