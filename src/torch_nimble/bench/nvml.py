"""What the driver's management library (NVML) tells of the GPU that is measured: energy, clocks, limits.

It is asked through ctypes, since no package for it need be there. Whatever it does not tell, because
there is no driver or the GPU is shared, is None or missing, and no measurement fails for it.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from typing import Any

import torch

from torch_nimble.bench.record import Json

_SM_CLOCK = 1
_LIMITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
}
"""Bits of what holds clocks down; not those that say that it was asked for, or that nothing runs."""


class Nvml:
    """One GPU, as NVML knows it."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def energy_mj(self) -> int | None:
        """Millijoules used since the driver was loaded. The counter moves some times a second."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) or None

    def sm_mhz(self) -> int | None:
        """The clock of the multiprocessors now."""
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, _SM_CLOCK)

    def limits(self) -> list[str] | None:
        """What holds clocks down now."""
        bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        return None if bits is None else [name for bit, name in _LIMITS.items() if bits & bit]

    def _read(self, function: str, kind: type[Any], *arguments: int) -> int | None:
        found = kind()
        with suppress(AttributeError):  # a driver that has no such function
            if not getattr(self._library, function)(self._handle, *arguments, ctypes.byref(found)):
                return int(found.value)
        return None


@functools.cache
def current() -> Nvml | None:
    """The current CUDA device; None where NVML does not know it."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    handle = ctypes.c_void_p()
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
            f"GPU-{uuid}".encode(), ctypes.byref(handle)
        )
        return None if failed else Nvml(library, handle)
    return None


def clocks() -> Json:
    """The clock of the multiprocessors in MHz, and what holds it down, as far as they are told."""
    nvml = current()
    if nvml is None:
        return {}
    found = {"sm_mhz": nvml.sm_mhz(), "limited_by": nvml.limits()}
    return {name: value for name, value in found.items() if value is not None}
