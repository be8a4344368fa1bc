"""From an ATen graph to a task graph and the program that carries it out."""

from torch_nimble.lower.aten import Lowered, lower
from torch_nimble.lower.program import Call, Output, Program, Ref

__all__ = ["Call", "Lowered", "Output", "Program", "Ref", "lower"]
