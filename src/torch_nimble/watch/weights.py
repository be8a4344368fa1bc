"""Constants of prepared plans, kept true to the model they came from.

Parameters and buffers that tasks read as they are stay references to the model's tensors, so changes
in place are seen by themselves. Values folded from them (a convolution with its batch norm) can go
stale. At each call (on a GPU after the launch) the engine compares, for every tensor it depends on,
whether the model still holds that very tensor, where its memory lies and whether its version counter
moved; if so, the folded values are made anew. Tensors made in inference mode have no counter. Steps of
optimizers that have them are noticed too, for fused ones move no counter. Batch norms in training mode
move none of their statistics', but they count their batches, and nobody trains without a change of
modes. Writes through `.data` or a numpy array that shares the memory move none either and cannot be
seen: `update_weights()` is for those.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from torch_nimble.capture import Callee, Source
from torch_nimble.lower import Program
from torch_nimble.watch.dicts import Tables
from torch_nimble.watch.modules import are_the_same
from torch_nimble.watch.optimizers import StepsOfOthers
from torch_nimble.watch.tensors import Written

_VERSION = operator.attrgetter("_version")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class Watch:
    """The model's tensors that a plan depends on, as they were when it last took them in."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        state: frozenset[str],
        modules: Iterable[nn.Module],
        asked: Iterable[torch.Tensor] = (),
    ) -> None:
        """Of tensors that are `asked` whether they require grad, that is looked at, too."""
        modules = list(modules)
        tensors = {name: source.tensor() for name, source in sources.items()}
        # Tied weights stand in several tables; replacing any of them changes the model.
        used = {id(tensor) for tensor in tensors.values()}
        own: list[dict[str, Any]] = [
            table for module in modules for table in (module._parameters, module._buffers) if table
        ]
        self._tables = [
            table for table in own if any(t is None or id(t) in used for t in table.values())
        ]
        whole = {id(table) for table in self._tables}
        self._single = [(s.table, s.key) for s in sources.values() if id(s.table) not in whole]
        others = {id(table): table for table, _ in self._single}
        self._touched = Tables([*self._tables, *others.values()])
        self._tensors, self._names = self._now(), self._names_now()
        # State is written by the plan itself, and read anew each time.
        counted = [
            tensor
            for name, tensor in tensors.items()
            if tensor is not None and name not in state and not tensor.is_inference()
        ]
        located = [tensor for tensor in tensors.values() if tensor is not None]
        self._written = Written(located, counted)
        own_state = {id(tensors[name]) for name in state}
        self._batches = [t for t in _batches_of(modules) if id(t) not in own_state]
        self._batch_versions = list(map(_VERSION, self._batches))
        self._asked = list(asked)
        self._require_grad = list(map(_REQUIRES_GRAD, self._asked))
        self._looks = self._looks_of(self._tensors)
        self._steps = StepsOfOthers(located)

    @classmethod
    def of(cls, program: Program, callee: Callee) -> Watch:
        """Over all that a program of this model reads; made before it is read, it misses nothing."""
        roots = [*callee.modules.values(), *callee.watched]
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        return cls(program.used_sources(), program.state, modules, callee.asked.values())

    def _now(self) -> list[Any]:
        now = list(chain.from_iterable(map(dict.values, self._tables)))
        return now + [table.get(key) for table, key in self._single]

    def _names_now(self) -> list[str]:
        return list(chain.from_iterable(self._tables))

    def unchanged(self) -> bool:
        """Whether the model still holds the same tensors, with the same versions and memory.

        `Module.to` and `p.data = q` exchange the memory of a parameter, which moves no counter.
        """
        if not self._touched.untouched():
            now = Tables(self._touched.tables)
            if not self._holds_the_same():
                return False
            self._touched = now
        return self._batch_versions == list(map(_VERSION, self._batches)) and self.as_they_were()

    def _holds_the_same(self) -> bool:
        """Whether tables that somebody has touched have the same tensors in them."""
        return are_the_same(self._tensors, self._now()) and self._names == self._names_now()

    def as_they_were(self) -> bool:
        """Whether nobody has written the tensors, or given them other memory."""
        return (
            self._steps.only()
            and self._written.untouched()
            and self._require_grad == list(map(_REQUIRES_GRAD, self._asked))
        )

    def fits(self) -> bool:
        """Whether what the model holds now has the shapes, dtypes and devices the plan was made for."""
        return (
            self._looks == self._looks_of(self._now())
            and self._names == self._names_now()
            and self._require_grad == list(map(_REQUIRES_GRAD, self._asked))
        )

    def _looks_of(self, tensors: list[Any]) -> Any:
        """Of a parameter that is replaced, whether it requires grad as the one before did."""
        held = [t for t in tensors if isinstance(t, torch.Tensor)] if self._asked else []
        return _looks(tensors), list(map(_REQUIRES_GRAD, held))


def _batches_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Where batch norms count batches: to write their statistics moves the version of this alone."""
    found = (module._buffers.get("num_batches_tracked") for module in modules)
    return [tensor for tensor in found if tensor is not None and not tensor.is_inference()]


def _looks(tensors: list[Any]) -> list[Any]:
    """What a plan takes for granted about its tensors, and which of them are the same one."""
    first: dict[int, int] = {}
    return [
        (t.shape, t.stride(), t.dtype, t.device, first.setdefault(id(t), i))
        if isinstance(t, torch.Tensor)
        else None
        for i, t in enumerate(tensors)
    ]
