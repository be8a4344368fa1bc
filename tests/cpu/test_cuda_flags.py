"""What a device for GPUs reads from torch can be read, whichever way a user has set it."""

from __future__ import annotations

import pytest

from cpu.helpers import run_script


@pytest.mark.parametrize(
    "setting",
    [
        'torch.backends.cuda.matmul.fp32_precision = "tf32"',
        'torch.backends.cudnn.conv.fp32_precision = "ieee"',
    ],
)
def test_precision_of_products_set_by_torchs_newer_names(setting: str) -> None:
    script = f"""
import torch
from torch_nimble.devices.cuda import CudaDevice

{setting}
device = object.__new__(CudaDevice)  # its flags are those of the process, with or without a GPU
device.allowed_error(torch.float32)
print(len(device.notes()))
"""
    assert run_script(script).strip().isdigit()
