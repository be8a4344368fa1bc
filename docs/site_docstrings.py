"""Docstrings say `name: meaning`, a line for each argument; here that becomes a list of arguments."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


class Arguments(griffe.Extension):
    """Puts "Args:" before a paragraph that begins with the name of an argument."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for each function that the reference shows."""
        if func.docstring is None:
            return
        names = {parameter.name for parameter in func.parameters}
        parts = func.docstring.value.split("\n\n")
        for i, part in enumerate(parts):
            found = re.match(r"(\w+): ", part)
            if found is not None and found[1] in names:
                parts[i] = "Args:\n" + textwrap.indent(part, "    ")
        func.docstring.value = "\n\n".join(parts)
