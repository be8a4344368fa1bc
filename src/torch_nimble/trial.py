"""Runs of a program that leave no trace, for measuring and checking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_nimble.capture import Adapter, TorchGenerators, generators_kept
from torch_nimble.lower import Lowered
from torch_nimble.weights import FoldedConstants

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class Trial:
    """Runs of a program that leave no trace: on copies of the state and of the written inputs."""

    def __init__(
        self,
        adapter: Adapter,
        lowered: Lowered,
        tensors: Sequence[torch.Tensor],
        folded: FoldedConstants,
    ) -> None:
        self._adapter = adapter
        self.lowered = lowered
        self.constants = folded.evaluate(lowered.program)
        program = lowered.program
        self.given = tensors
        self._written = [slot.mutated for slot in program.inputs]
        self.inputs = [
            _in_layout(tensor, slot.strides, copy=slot.mutated)
            for tensor, slot in zip(tensors, program.inputs, strict=True)
        ]
        self._state = {
            name: tensor
            for name in program.state & program.constants
            if (tensor := program.sources[name].tensor()) is not None
        }
        self._copies = {name: tensor.clone() for name, tensor in self._state.items()}
        self.copied_constants = {**self.constants, **self._copies}
        self._generators = TorchGenerators()

    def eager(self) -> list[torch.Tensor]:
        """What the model itself returns and leaves in what it writes, from the caller's random state."""
        copies = [
            tensor.clone() if written else tensor
            for tensor, written in zip(self.given, self._written, strict=True)
        ]
        with generators_kept():
            results, buffers = self._adapter.eager(copies)
        sources = self.lowered.program.sources
        return [
            *(result.detach() for result in results),
            *(buffers[sources[name].target] for name in self._state),
            *(copy for copy, written in zip(copies, self._written, strict=True) if written),
        ]

    def run(self, run: Run) -> list[torch.Tensor]:
        """What a plan returns and leaves in what it writes, in the same order."""
        self.restore()
        return [
            *run(self.inputs),
            *self._copies.values(),
            *(copy for copy, written in zip(self.inputs, self._written, strict=True) if written),
        ]

    def restore(self) -> None:
        """Put the copies and the generator back to where the caller's are."""
        for tensor, given, written in zip(self.inputs, self.given, self._written, strict=True):
            if written:
                tensor.copy_(given)
        for name, tensor in self._state.items():
            self._copies[name].copy_(tensor)
        self._generators.restore()


def _in_layout(tensor: torch.Tensor, strides: tuple[int, ...], *, copy: bool) -> torch.Tensor:
    """The tensor itself if it lies as the program wants it, else a copy that does."""
    if tensor.stride() == strides and not copy:
        return tensor.detach()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())
