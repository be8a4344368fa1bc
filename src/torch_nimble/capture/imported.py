"""What a function reads of modules that it knows by a name: `settings.scale` after `import settings`."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

Place = tuple[str, dict[str, Any], str]
"""A name for people, the table of a module, the key in it."""
_NAMES = frozenset(["LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_NAME"])
_ATTRIBUTES = frozenset(["LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"])
_BETWEEN = frozenset(["COPY", "DUP_TOP", "EXTENDED_ARG"])  # the first two in settings.count += 1


_LEFT_OUT = frozenset(["torch", "torch_nimble", *sys.stdlib_module_names])


def attributes_of_modules(function: types.FunctionType) -> Iterator[Place]:
    """Attributes that are there now, of modules that a function names; not torch's and Python's."""
    chains = _chains(function.__code__)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for root, *names in chains:
        try:
            value = cells[root].cell_contents if root in cells else function.__globals__.get(root)
        except ValueError:  # a variable that is not assigned yet
            continue
        said = root
        for name in names:
            if not isinstance(value, types.ModuleType) or value.__name__.split(".")[0] in _LEFT_OUT:
                break
            table, said = vars(value), f"{said}.{name}"
            if name not in table:
                break
            yield said, table, name
            value = table[name]


@functools.lru_cache
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Names with the attributes that code reads of them, `a.b.c` as one, code inside it included."""
    found: list[tuple[str, ...]] = []
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in _ATTRIBUTES and chain:
            chain = (*chain, str(step.argval))
        elif step.opname not in _BETWEEN:
            found.append(chain)
            chain = (str(step.argval),) if step.opname in _NAMES else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _chains(constant)
    return tuple(dict.fromkeys(chain for chain in found if len(chain) > 1))
