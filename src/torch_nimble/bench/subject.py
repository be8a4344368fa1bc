"""What a process measures: a model on a device, in a dtype and a layout, and inputs for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from torch_nimble.bench.record import Json
from torch_nimble.bench.suites import Case
from torch_nimble.commands.targets import DTYPES, load_target, make_inputs
from torch_nimble.execute.check import worst_error
from torch_nimble.tree import flatten_inputs, flatten_output, unflatten_inputs
from torch_nimble.zoo.loading import RECIPES

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Call = Callable[..., Any]


class Replayable(Protocol):
    """A graph."""

    def replay(self) -> None:
        """Start it, without what a call does around it."""


@dataclass(frozen=True)
class Part:
    """What one process is to do. `cache` is a folder, `plan` a file."""

    measure: str
    case: Case
    device: str
    systems: tuple[str, ...]
    rounds: int = 15
    signatures: int = 1
    cudnn_benchmark: bool = False
    cache: str = ""
    plan: str = ""
    turns: str = ""
    """A file that processes lock while they take times, where several are under way."""
    bytecode: str = ""
    """A folder for modules as Python compiles them, if it is not to do as its environment says."""
    finds_caches: bool = False
    """Whether somebody may have compiled there before: then preparation is not timed."""

    @classmethod
    def from_dict(cls, data: Json) -> Part:
        """The part that `dataclasses.asdict` made into this."""
        case: Json = {name: tuple(v) if isinstance(v, list) else v for name, v in data["case"].items()}
        return cls(**{**data, "case": Case(**case), "systems": tuple(data["systems"])})

    @property
    def layout(self) -> torch.memory_format:
        """Images in half precision are channels-last for all systems, which is faster for all."""
        recipe = RECIPES.get(self.case.target)
        images = recipe is not None and recipe.library != "transformers"
        half = self.case.dtype in ("fp16", "bf16") and self.device == "cuda"
        return torch.channels_last if images and half else torch.contiguous_format


@dataclass(frozen=True)
class Subject:
    """A part's model and inputs."""

    part: Part
    model: Any

    @classmethod
    def load(cls, part: Part) -> Subject:
        """Built and calibrated in float32, then converted."""
        case = part.case
        model = load_target(case.target, case.inputs, device=part.device).model
        if isinstance(model, torch.nn.Module):
            model = model.eval().to(device=part.device, dtype=_dtype(case))
            if part.layout is torch.channels_last:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return cls(part, model)

    def inputs(self, seed: int, batch: int | None = None) -> Inputs:
        """Other values for each seed, of the same kind."""
        case, recipe = self.part.case, RECIPES.get(self.part.case.target)
        if recipe is not None and not case.inputs:
            generator = torch.Generator().manual_seed(1000 + seed)
            return self._placed(recipe.inputs(generator, batch or case.batch, recipe.resolution))
        return self._placed((make_inputs(case.inputs, seed), {}))

    def _placed(self, inputs: Inputs) -> Inputs:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            dtype = _dtype(self.part.case) if tensor.is_floating_point() else tensor.dtype
            form = self.part.layout if tensor.dim() == 4 else torch.contiguous_format
            return tensor.to(device=self.part.device, dtype=dtype).contiguous(memory_format=form)

        tensors, structure = flatten_inputs(*inputs)
        args, kwargs = unflatten_inputs(structure, [placed(tensor) for tensor in tensors])
        return tuple(args), kwargs

    @cached_property
    def shapes(self) -> list[str]:
        """The shapes of the inputs, as they are written on the command line."""
        tensors, _ = flatten_inputs(*self.inputs(0))
        return ["x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors]

    def synchronize(self) -> None:
        """Wait for what was called; on a GPU for this stream only, as others may be busy on purpose."""
        if self.part.device == "cuda":
            torch.cuda.current_stream().synchronize()

    def references(self, cases: Sequence[Inputs]) -> list[list[torch.Tensor]]:
        """What the model gives in float64, for the weights and inputs it has in its own dtype.

        What cannot work in float64 is its own reference.
        """
        exact = self.model
        if isinstance(exact, torch.nn.Module):
            exact = copy.deepcopy(exact).double()

        def results(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
            tensors, structure = flatten_inputs(args, kwargs)
            wide = [t.double() if t.is_floating_point() else t.clone() for t in tensors]
            wide_args, wide_kwargs = unflatten_inputs(structure, wide)
            try:
                out = exact(*wide_args, **wide_kwargs)
            except RuntimeError:
                out = self.model(*args, **kwargs)
            return flatten_output(out)[0]

        return [results(args, kwargs) for args, kwargs in cases]


def _dtype(case: Case) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPES[case.dtype])
    return dtype


def error_of(call: Call, case: Inputs, reference: Sequence[torch.Tensor]) -> float:
    """The largest relative error of the results."""
    found, _ = flatten_output(call(*case[0], **case[1]))
    return worst_error([t.double() if t.is_floating_point() else t for t in found], reference)
