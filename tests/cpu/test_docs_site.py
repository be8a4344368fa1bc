"""The documentation's pages: their code runs, what they quote and name exists, the site builds alone."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
import typing
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import typer

import torch_nimble
from torch_nimble import compat, errors, schedule, zoo
from torch_nimble.cli import app
from torch_nimble.zoo import libraries

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# What a block may say that it needs, in its title, and whether that is here. The first run in
# tests/gpu/test_docs.py; `make test` installs timm; the last has a test of its own.
NEEDS = {
    "needs a GPU": torch.cuda.is_available,
    "needs timm": lambda: importlib.util.find_spec("timm") is not None,
    "needs several processes": lambda: False,
}
MOST_BLOCKS_WITH_NEEDS = 8


def blocks(page: Path, language: str) -> list[tuple[str, str, int]]:
    """Title, code and first line of each block in a language."""
    text = page.read_text()
    return [
        (found[2].strip(), found[3], text[: found.start(3)].count("\n"))
        for found in BLOCK.finditer(text)
        if found[1] == language
    ]


def need_of(title: str) -> str | None:
    if not title:
        return None
    named = re.fullmatch(r'title="(.*)"', title)
    assert named is not None, f"{title!r} is no title"
    assert named[1] in NEEDS, f"a block {named[1]!r}; it may say {', '.join(NEEDS)}"
    return named[1]


@pytest.fixture
def libraries_work() -> None:
    """transformers and timm import torchvision, which needs a repair beside some builds of torch."""
    if importlib.util.find_spec("torchvision") is not None:
        libraries.import_torchvision()


@pytest.fixture
def log_kept() -> Iterator[None]:
    """A page shows how to listen to the log."""
    root, own = logging.getLogger(), logging.getLogger("torch_nimble")
    handlers, level = list(root.handlers), own.level
    yield
    root.handlers[:] = handlers
    own.setLevel(level)


@pytest.mark.usefixtures("libraries_work", "log_kept")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda p: p.name
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page.name == "libraries.md":
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for title, code, line in blocks(page, "python"):
        need = need_of(title)
        compiled = compile("\n" * line + code, str(page), "exec")
        if need is None or NEEDS[need]():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", torch_nimble.NimbleWarning)
                exec(compiled, names)
    printed = capsys.readouterr().out
    for _, shown, _ in blocks(page, "text"):  # up to the first line that differs from run to run
        for line in itertools.takewhile(lambda line: "…" not in line, shown.splitlines()):
            assert line in printed or torch.cuda.is_available(), f"{line!r} is not what is printed"


def test_few_blocks_need_what_may_not_be_here() -> None:
    needs = [need_of(title) for page in PAGES for title, _, _ in blocks(page, "python")]
    assert len([need for need in needs if need]) <= MOST_BLOCKS_WITH_NEEDS


def test_the_block_for_several_processes_runs_in_two(tmp_path: Path) -> None:
    """As the page has it, with another way to talk and a step where the page has dots."""
    page = DOCS / "training.md"
    (shown,) = (code for title, code, _ in blocks(page, "python") if "several processes" in title)
    assert shown.count("\n...\n") == shown.count('"nccl"') == 1
    run = shown.replace('"nccl"', '"gloo"').replace("\n...\n", "\nloss, hits = step(x, target)\n")
    script = tmp_path / "processes.py"
    script.write_text(blocks(page, "python")[0][1] + "step.close()\n" + run)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={
                **os.environ,
                **place,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "CUDA_VISIBLE_DEVICES": "",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said


def commands() -> list[tuple[str, list[str]]]:
    """Every command line of ours that a page shows."""
    return [
        (page.name, shlex.split(line.removeprefix("$ "), comments=True))
        for page in PAGES
        for _, code, _ in blocks(page, "console")
        for line in code.splitlines()
        if line.startswith("$ torch-nimble")
    ]


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda v: v if isinstance(v, str) else " ".join(v)
)
def test_the_commands_of_the_pages_can_be_parsed(page: str, words: list[str]) -> None:
    main = typer.main.get_command(app)
    known = {"--help"} | {option for p in main.params for option in p.opts}
    rest = words[1:]
    while rest and rest[0].startswith("-"):
        assert rest.pop(0) in known, f"{page}: {' '.join(words)}"
    if rest and rest[0] != "…":
        main.commands[rest[0]].make_context(rest[0], rest[1:])  # type: ignore[attr-defined]


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    text = (DOCS / "command-line.md").read_text()
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"`{name}" in text, f"docs/command-line.md does not name {name}"


# -------------------------------------------------------------------- the reference


def test_every_public_name_has_a_place_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    places = shown | set(re.findall(r"\{ #(\S+) \}", text))
    for name in torch_nimble.__all__:
        assert f"torch_nimble.{name}" in places, f"docs/api.md has no place for {name}"
    for module in (schedule, zoo):
        for name in module.__all__:
            assert f"{module.__name__}.{name}" in shown, f"docs/api.md has no place for {name}"
    assert f"{compat.__name__}.Nimble" in shown


def test_what_public_methods_return_has_a_place_in_the_reference() -> None:
    shown = set(re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    returned = {
        typing.get_type_hints(method).get("return")
        for owner in (torch_nimble.Engine, torch_nimble.TrainingStep)
        for name, method in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
    }
    classes = {kind for kind in returned if isinstance(kind, type) and kind.__module__ in sys.modules}
    ours = {kind for kind in classes if kind.__module__.startswith("torch_nimble")}
    assert torch_nimble.Explanation in ours
    for kind in ours:
        assert any(f"{module}.{kind.__name__}" in shown for module in places_of(kind)), kind


def places_of(kind: type) -> list[str]:
    """Modules that it may be imported from: its own and those around it."""
    parts = kind.__module__.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


# -------------------------------------------------------------------- messages

_GAP = "\0"


@cache
def messages() -> tuple[str, ...]:
    """Every text in the source, with a gap wherever something is filled in."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in documentation:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else _GAP for p in node.values]
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return tuple(sorted(found))


def is_quoted_from(message: str, quoted: str) -> bool:
    """Whether a message has the quoted parts in this order, something filled in between them."""
    parts = [re.escape(part) for part in quoted.split("…")]
    return re.search(f"[^\n]*{_GAP}[^\n]*?".join(parts), message) is not None


def quoted_messages() -> list[str]:
    text = (DOCS / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(.+?)`(?: \(`\w+`\))? \|", text, re.MULTILINE)
    assert len(rows) > 60
    return [quoted for row in rows for quoted in row.split("`, `")]


@pytest.mark.parametrize("quoted", quoted_messages())
def test_quoted_messages_are_in_the_source(quoted: str) -> None:
    assert any(is_quoted_from(message, quoted) for message in messages())


def test_a_message_that_is_not_there_is_not_found() -> None:
    assert not any(is_quoted_from(message, "the moon is made of …") for message in messages())
    assert not is_quoted_from(f"a {_GAP} b", "b … a")


# What is raised with these names is shown to users. A LoweringError is not: another lowering is tried,
# and its text is the reason in "kernels cannot be fused: …" and the like.
SHOWN = {
    *(name for name in vars(errors) if name.endswith("Error") and name != "LoweringError"),
    "RefusedError",
    "FloatingPointError",
    "warn",
    "_fall_back",
    "_refuse",
}


def shown_messages() -> dict[str, list[str]]:
    """By its place in the source, the texts of each error and warning, of which one has to be quoted."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            told = node.args[1:2] if name == "_refuse" else node.args[:1]  # which has a signature first
            texts = [text for argument in told for text in texts_of(argument)]
            if name in SHOWN and texts:
                found[f"{path.name}:{node.lineno} {name}"] = texts
    return found


def texts_of(node: ast.expr) -> list[str]:
    """The texts that an expression may be, with gaps; none if it is a value from elsewhere."""
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(p.value) if isinstance(p, ast.Constant) else _GAP for p in node.values)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [*texts_of(node.body), *texts_of(node.orelse)]
    if isinstance(node, ast.BinOp):
        rights = texts_of(node.right) or [_GAP]
        return [left + right for left in texts_of(node.left) for right in rights]
    return []


def test_every_message_of_the_source_is_in_the_troubleshooting() -> None:
    quotes = quoted_messages()
    shown = shown_messages()
    assert len(shown) > 150
    missing = {
        place: texts
        for place, texts in shown.items()
        if not any(is_quoted_from(text, quoted) for text in texts for quoted in quotes)
    }
    assert not missing, "docs/troubleshooting.md has no row for these"


def test_every_public_error_is_in_the_troubleshooting() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    for name in torch_nimble.__all__:
        if name.endswith("Error") and name != "NimbleError":
            assert name in text, f"docs/troubleshooting.md says nothing of {name}"


# -------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def drawing() -> object:
    spec = importlib.util.spec_from_file_location("make_figures", DOCS / "make_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def assert_current(figures: dict[str, str]) -> None:
    for name, drawn in figures.items():
        committed = (DOCS / "figures" / name).read_text(encoding="utf-8")
        assert committed == drawn, f"{name} is not current; python docs/make_figures.py draws it"


def test_the_small_graph_s_figures_are_current(drawing: object) -> None:
    assert_current(drawing.small_figures())  # type: ignore[attr-defined]


@pytest.mark.usefixtures("libraries_work")
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
def test_the_network_s_figures_are_current_and_its_numbers_on_the_page(drawing: object) -> None:
    graph = drawing.googlenet()  # type: ignore[attr-defined]
    assert_current(drawing.network_figures(graph))  # type: ignore[attr-defined]
    plan = schedule.max_concurrency(graph)
    text = " ".join((DOCS / "how-it-works.md").read_text().split())
    tasks = len(graph.tasks)
    assert (
        f"{tasks} tasks in {plan.chains} chains on {plan.streams} streams with {plan.waits} waits"
        in text
    )
    assert f"longest path has {schedule.critical_path(graph)[0]:.0f} tasks" in text


def test_every_figure_is_drawn_and_shown(drawing: object) -> None:
    shown = set(re.findall(r"\]\(figures/(\S+)\)", (DOCS / "how-it-works.md").read_text()))
    assert shown == {path.name for path in (DOCS / "figures").iterdir()}


# -------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    folder: Path = tmp_path_factory.mktemp("site")
    # Not with --quiet: then --strict does not see warnings.
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_without_warnings(site: Path) -> None:
    built = {path.name for path in site.glob("*.html")}
    assert {page.with_suffix(".html").name for page in DOCS.glob("*.md")} <= built
    assert {"index.html", "examples.html", "CHANGELOG.html"} <= built
    text = (site / "api.html").read_text()
    for name in torch_nimble.__all__:
        assert re.search(rf'id="torch_nimble\.(\w+\.)*{name}"', text), f"the reference lacks {name}"


def test_the_site_fetches_nothing(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r'(?:src|href)=["\']?(?:https?:)?//', tag), f"{page.name}: {tag}"
    for style in site.rglob("*.css"):
        found = re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//\S{0,40}", style.read_text())
        assert found is None, f"{style.name}: {found}"
