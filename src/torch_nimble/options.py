"""The options of `compile()`, checked once and frozen."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch_nimble.errors import OptionError
from torch_nimble.kernels.sites import EFFORTS, Effort
from torch_nimble.plans import Plan
from torch_nimble.taskgraph import TaskGraph

OnNewShape = Literal["prepare", "eager", "error"]
Planner = Callable[[TaskGraph], Plan]


@dataclass(frozen=True)
class Options:
    """What a user chose; see `compile()` for the meaning of each."""

    on_new_shape: OnNewShape = "prepare"
    max_graphs: int = 8
    batch_sizes: tuple[int, ...] = ()
    strict: bool = False
    plan: Plan | None = None
    planner: Planner | None = None
    static_outputs: bool = False
    memory_limit: int | None = None
    tune: Effort = "fast"

    @classmethod
    def checked(
        cls,
        *,
        on_new_shape: str = "prepare",
        max_graphs: int = 8,
        batch_sizes: Sequence[int] | None = None,
        strict: bool = False,
        plan: Plan | str | Path | Mapping[str, Any] | None = None,
        planner: Planner | None = None,
        static_outputs: bool = False,
        memory_limit: int | None = None,
        tune: str = "fast",
    ) -> Options:
        """The options, or OptionError with the value that is wrong and the values that are not."""
        if on_new_shape not in get_args(OnNewShape):
            allowed = ", ".join(map(repr, get_args(OnNewShape)))
            raise OptionError(f"on_new_shape is {on_new_shape!r}; it must be one of {allowed}")
        if isinstance(max_graphs, bool) or not isinstance(max_graphs, int) or max_graphs < 1:
            raise OptionError(f"max_graphs is {max_graphs!r}; it must be a number from 1 on")
        given = batch_sizes or ()
        if isinstance(given, int | str) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in given
        ):
            raise OptionError(f"batch_sizes is {batch_sizes!r}; it must be a list of numbers from 1 on")
        sizes = tuple(sorted(set(given)))
        if len(sizes) > max_graphs:
            raise OptionError(
                f"batch_sizes has {len(sizes)} sizes, but max_graphs allows only {max_graphs} plans; "
                "raise max_graphs or give fewer sizes"
            )
        if memory_limit is not None and (
            isinstance(memory_limit, bool) or not isinstance(memory_limit, int) or memory_limit < 0
        ):
            raise OptionError(f"memory_limit is {memory_limit!r}; it must be a number of bytes")
        if tune not in EFFORTS:
            raise OptionError(f"tune is {tune!r}; it must be one of {', '.join(map(repr, EFFORTS))}")
        if plan is not None and planner is not None:
            raise OptionError("plan= and planner= exclude each other; give one of them")
        if planner is not None and not callable(planner):
            raise OptionError(f"planner is {planner!r}; it must be a function from TaskGraph to Plan")
        if isinstance(plan, Mapping):
            plan = Plan.from_dict(plan)
        elif isinstance(plan, str | os.PathLike):
            plan = Plan.load(plan)
        elif plan is not None and not isinstance(plan, Plan):
            raise OptionError(f"plan is {plan!r}; it must be a Plan, a path to one, or its JSON object")
        return cls(
            on_new_shape,  # type: ignore[arg-type]
            max_graphs,
            sizes,
            bool(strict),
            plan,
            planner,
            bool(static_outputs),
            memory_limit,
            tune,  # type: ignore[arg-type]
        )


def disabled_by_environment() -> bool:
    """Whether TORCH_NIMBLE_DISABLE=1 asks for eager execution everywhere."""
    return os.environ.get("TORCH_NIMBLE_DISABLE", "") not in ("", "0")
