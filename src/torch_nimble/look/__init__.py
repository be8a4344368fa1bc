"""What the pages of this package have in common: frame, colours, type, tables, the switch of the theme.

A page is one file that needs nothing but itself: style and script are put into it, and its policy lets
the browser fetch nothing. Needs no torch.
"""

from __future__ import annotations

import html
import string
from collections.abc import Iterable
from importlib import resources

from torch_nimble.look.tables import NOTHING, Cell, Grid, number, table, word

__all__ = ["NOTHING", "Cell", "Grid", "asset", "number", "page", "table", "tiles", "word"]


def asset(package: str, name: str) -> str:
    """The text of a file that lies in a package."""
    return (resources.files(package) / name).read_text(encoding="utf-8")


def page(
    *,
    subject: str,
    summary: str,
    contents: Iterable[tuple[str, str]],
    main: str,
    style: str,
    script: str,
) -> str:
    """The whole document; `contents` are the names and titles of its sections.

    `subject` and `summary` are text and escaped here, as are the titles; `main` is HTML.
    """
    return string.Template(asset(__name__, "page.html")).substitute(
        subject=html.escape(subject),
        summary=html.escape(summary),
        contents="\n".join(
            f'<li><a href="#{name}">{html.escape(title)}</a></li>' for name, title in contents
        ),
        main=main,
        style=asset(__name__, "look.css") + style,
        script=asset(__name__, "look.js") + script,
    )


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """A list of values, each with what it is and a tone, `lead` or none."""
    shown = "\n".join(
        f'<li class="{tone}"><strong>{html.escape(value)}</strong><span>{html.escape(text)}</span></li>'
        for value, text, tone in items
    )
    return f'<ul class="tiles">\n{shown}\n</ul>'
