"""Ahead-of-time, multi-stream execution of static neural networks on stock PyTorch.

    import torch_nimble as nimble

    fast = nimble.compile(model)       # plans at the first call
    y = fast(x)
    print(fast.explain())

The names below are the public interface. They are loaded when first used, so that importing the
package, or asking the command line for help, does not load torch.
"""

from __future__ import annotations

import importlib
import logging
import random
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_nimble import compat, schedule, zoo
    from torch_nimble.api import compile, compile_step, plan
    from torch_nimble.engine import Engine
    from torch_nimble.errors import (
        CaptureError,
        FallbackError,
        GraphError,
        InputError,
        MissingDependencyError,
        NimbleError,
        NimbleWarning,
        OptionError,
        PlanError,
        StateError,
        UnknownNetworkError,
    )
    from torch_nimble.explain import Explanation
    from torch_nimble.plans import GraphFacts, Launch, Plan
    from torch_nimble.regions import Region
    from torch_nimble.taskgraph import Buffer, Task, TaskGraph
    from torch_nimble.training.step import TrainingStep

__version__ = "0.1.0"

logging.getLogger("torch_nimble").addHandler(logging.NullHandler())  # silent until somebody listens

_HOME = {
    "Buffer": "taskgraph",
    "CaptureError": "errors",
    "Engine": "engine",
    "Explanation": "explain",
    "FallbackError": "errors",
    "GraphError": "errors",
    "GraphFacts": "plans",
    "InputError": "errors",
    "Launch": "plans",
    "MissingDependencyError": "errors",
    "NimbleError": "errors",
    "NimbleWarning": "errors",
    "OptionError": "errors",
    "Plan": "plans",
    "PlanError": "errors",
    "Region": "regions",
    "StateError": "errors",
    "Task": "taskgraph",
    "TaskGraph": "taskgraph",
    "TrainingStep": "training.step",
    "UnknownNetworkError": "errors",
    "compile": "api",
    "compile_step": "api",
    "plan": "api",
}
_MODULES = ("compat", "schedule", "zoo")

__all__ = [
    "Buffer",
    "CaptureError",
    "Engine",
    "Explanation",
    "FallbackError",
    "GraphError",
    "GraphFacts",
    "InputError",
    "Launch",
    "MissingDependencyError",
    "NimbleError",
    "NimbleWarning",
    "OptionError",
    "Plan",
    "PlanError",
    "Region",
    "StateError",
    "Task",
    "TaskGraph",
    "TrainingStep",
    "UnknownNetworkError",
    "compat",
    "compile",
    "compile_step",
    "plan",
    "schedule",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(_imported(_HOME[name]), name)
    if name in _MODULES:
        return _imported(name)
    raise AttributeError(f"module 'torch_nimble' has no attribute {name!r}")


def _imported(name: str) -> ModuleType:
    """A module of ours. Others that come with it draw random numbers; the caller's stay as they are."""
    before = random.getstate()
    try:
        return importlib.import_module(f"torch_nimble.{name}")
    finally:
        random.setstate(before)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
