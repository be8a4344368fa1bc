"""A model is captured while nobody else in the process traces, whoever that may be."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock

from torch_nimble.capture import Adapter, Callee, capture
from torch_nimble.tree import flatten_inputs


def test_capture_waits_for_a_torch_compile_of_another_thread() -> None:
    """torch.fx keeps what it patches in a global: two that trace at once break each other."""
    tensors, structure = flatten_inputs((torch.randn(2, 4),), {})
    adapter = Adapter(Callee(nn.Linear(4, 4)), structure)
    captured = threading.Event()

    def work() -> None:
        with torch.no_grad():
            capture(adapter, tensors)
        captured.set()

    thread = threading.Thread(target=work)
    with compile_lock:  # as torch.compile does while it traces
        thread.start()
        came_through = captured.wait(2)
    thread.join(30)
    assert captured.is_set()
    assert not came_through
