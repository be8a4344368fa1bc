"""What preparing a plan means on each kind of device."""

from __future__ import annotations

import torch

from torch_nimble.devices.base import Device, Entry, Executable, RefusedError

__all__ = ["Device", "Entry", "Executable", "RefusedError", "device_for"]


def device_for(device: torch.device) -> Device | None:
    """How plans are made and run there; None if there is no engine for such devices."""
    if device.type == "cpu":
        from torch_nimble.devices.cpu import CpuDevice

        return CpuDevice()
    if device.type == "cuda":
        from torch_nimble.devices.cuda import CudaDevice

        return CudaDevice(device)
    return None
