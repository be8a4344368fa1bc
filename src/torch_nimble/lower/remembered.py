"""Which program a graph was compiled to, remembered on disk between processes.

Inductor caches what it compiles, but to find it there the graph has to be traced anew, which takes as
long as everything else of a second preparation together. Here the graph as we hand it over is the key.
A graph is remembered only if its text says all there is to it: plain operators, no tensors or code of
its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torch_nimble.drafts import write_whole
from torch_nimble.errors import first_line
from torch_nimble.flags import numeric_flags

_DRIVER = Path("/proc/driver/nvidia/version")
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu12")
_KNOWN_OPERATORS = ("aten", "prims", "torch_nimble")


def fingerprint(
    graph: fx.Graph, examples: Iterable[torch.Tensor], settings: Mapping[str, Any]
) -> str | None:
    """The same for graphs that compile to the same program here; None if text does not tell it all."""
    if not all(map(_is_told_by_text, graph.nodes)):
        return None
    parts = [
        str(graph),
        *(f"{tuple(t.shape)} {t.stride()} {t.dtype} {t.device}" for t in examples),
        json.dumps({name: repr(value) for name, value in settings.items()}, sort_keys=True),
        *surroundings(),
        own_code(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def recall(folder: Path, key: str) -> Mapping[str, Any] | None:
    """What was remembered under that key, and the `path` of its program, if that is still the same.

    Processes that compile the same graph may make different programs of it, by what was faster then.
    """
    path = folder / f"{key}.py"
    try:
        known = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    is_whole = isinstance(known, dict) and known.get("program") == _digest(text)
    return {**known, "path": str(path)} if is_whole else None


def remember(folder: Path, key: str, known: Mapping[str, Any], program: str) -> None:
    """Keep that and the program's text for other processes; not being able to write is no harm."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{key}.py", program)
        write_whole(folder / f"{key}.json", json.dumps({**known, "program": _digest(program)}))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_told_by_text(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in _KNOWN_OPERATORS
    module = getattr(node.target, "__module__", "") or ""
    return module == "_operator" or module.startswith("torch_nimble.lower.passes")


def surroundings() -> list[str]:
    """Versions, the device, and the flags of torch that what is compiled and timed depends on."""
    device = []
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = [found.name, found.major, found.minor, found.multi_processor_count, found.total_memory]
    return [
        torch.__version__,
        str(torch.version.git_version),
        _version_of("triton"),
        *_libraries(),
        str(device),
        str(torch.get_default_dtype()),
        str(numeric_flags()),
    ]


def _libraries() -> list[str]:
    """Versions of a GPU's libraries and of its driver, as far as they are told.

    Torch tells for which CUDA it was built. Its packages of cuBLAS and cuDNN can be exchanged.
    """
    try:
        cudnn = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    except RuntimeError as reason:  # one that does not fit
        cudnn = first_line(reason)
    try:
        driver = first_line(_DRIVER.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        driver = ""
    return [str(torch.version.cuda), cudnn, *map(_version_of, _CUBLAS), driver]


@functools.cache
def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def own_code() -> str:
    """Of the rewrites and operators that a graph may still contain calls of."""
    lower, digest = Path(__file__).parent, hashlib.sha256()
    for folder in (lower, lower.with_name("kernels")):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
