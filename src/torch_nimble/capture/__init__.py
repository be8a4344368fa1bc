"""From a model and example inputs to a functional ATen graph with static shapes."""

from torch_nimble.capture.callee import Callee, refuse_unplain_state
from torch_nimble.capture.fastpaths import has_fast_paths
from torch_nimble.capture.generators import TorchGenerators, generators_kept
from torch_nimble.capture.inference import (
    MODEL_LOCK,
    Adapter,
    AutocastState,
    Captured,
    Source,
    StandIn,
    Traceable,
    capture,
)
from torch_nimble.capture.isolation import (
    Assigned,
    ParametersUnwritten,
    attributes_kept,
    copied_as_it_lies,
    examples,
    values_kept,
)

__all__ = [
    "MODEL_LOCK",
    "Adapter",
    "Assigned",
    "AutocastState",
    "Callee",
    "Captured",
    "ParametersUnwritten",
    "Source",
    "StandIn",
    "TorchGenerators",
    "Traceable",
    "attributes_kept",
    "capture",
    "copied_as_it_lies",
    "examples",
    "generators_kept",
    "has_fast_paths",
    "refuse_unplain_state",
    "values_kept",
]
