"""Every error a user can meet, in one place.

Each message says what is wrong, with the values, and what to do about it. All derive from
`NimbleError`, and from the built-in exception a caller would expect for that kind of mistake.
"""


class NimbleError(Exception):
    """The root of all errors that torch-nimble raises on purpose."""


class OptionError(NimbleError, ValueError):
    """An option of `compile()` or of the command line has a value that makes no sense."""


class InputError(NimbleError, ValueError):
    """The inputs of a call do not fit the model or what was prepared."""


class CaptureError(NimbleError, RuntimeError):
    """The model cannot be turned into a static graph."""


class LoweringError(NimbleError, RuntimeError):
    """A captured graph cannot be turned into tasks by this lowering; another one may do."""


class GraphError(NimbleError, ValueError):
    """A task graph is malformed: a cycle, an unknown name, a missing field, a bad cost."""


class PlanError(NimbleError, ValueError):
    """A plan does not fit its task graph, or leaves a dependency unordered."""


class FallbackError(NimbleError, RuntimeError):
    """Something would have run eagerly, and `strict=True` forbids that."""


class StateError(NimbleError, RuntimeError):
    """The engine is not in a state for this call: closed, forked, or nothing prepared."""


class UnknownNetworkError(NimbleError, LookupError):
    """The zoo has no network of that name."""


class MissingDependencyError(NimbleError, ImportError):
    """An optional library is needed for this and is not installed."""


class NimbleWarning(UserWarning):
    """The engine does something slower than asked for, and says so once."""


def first_line(reason: BaseException | str) -> str:
    """What an error says, without the rest; its type if it says nothing."""
    lines = str(reason).strip().splitlines()
    unsaid = "no reason is known" if isinstance(reason, str) else type(reason).__name__
    return lines[0] if lines else unsaid
