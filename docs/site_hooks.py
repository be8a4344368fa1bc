"""What the site has beside docs/: the README as its first page, the examples, the record's page.

Links stay as they must be in the repository, so that it can be read there too; here they are turned to
where things are in the site.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside of docs/."""
    made = {"index.md": (ROOT / "README.md").read_text(), "examples.md": _examples()}
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        made[name] = (ROOT / name).read_text()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*")):
        if path.suffix in (".html", ".svg"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    if page.file.src_uri == "index.md":
        markdown = markdown.replace("](docs/", "](").replace("](examples/", "](../examples/")
    markdown = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples.md#\1)", markdown)
    markdown = markdown.replace("](../benchmarks/results)", "](benchmarks/results/index.html)")
    return markdown.replace("](../", "](")


def _examples() -> str:
    """Every example with its first sentence and its whole code."""
    parts = ["# Examples\n\nEach is a whole script that runs as it is, and runs in the tests.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text()
        first = (ast.get_docstring(ast.parse(code)) or "").partition("\n\n")[0]
        parts.append(f"## {path.name} {{ #{path.stem} }}\n\n{first}\n\n```python\n{code}```\n")
    return "\n".join(parts)
