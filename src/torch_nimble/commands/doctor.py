"""`torch-nimble doctor`: what is here, what will be used, what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import torch_nimble
from torch_nimble.options import disabled_by_environment

_REQUIRED = ("torch", "numpy", "rich", "typer")
_OPTIONAL = {
    "torchvision": "most image networks of the zoo: pip install torchvision",
    "timm": "more vision models: pip install timm",
    "transformers": "BERT, GPT-2 and ViT in the zoo: pip install transformers",
    "onnxruntime": "a peer of `torch-nimble bench` on CPUs: pip install onnxruntime onnx onnxscript",
    "jax": "a peer of `torch-nimble bench`, XLA: pip install jax",
}


def examine() -> dict[str, Any]:
    """All findings as JSON-ready data."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if disabled_by_environment():
        engine = "none: TORCH_NIMBLE_DISABLE is set, everything runs eagerly"
    else:
        engine = f"CPU threads, {torch.get_num_threads()} intra-operator threads to divide"
        if gpus:
            from torch_nimble.lower.inductor import unsupported

            reason = unsupported()
            kernels = "Inductor's fused kernels" if reason is None else f"torch's operators ({reason})"
            engine = f"CUDA graphs of {kernels}; for models on the CPU: {engine}"
    from torch_nimble.watch.dicts import tells_of_attributes
    from torch_nimble.watch.tensors import by_compiled_code

    weights = (
        "compiled code" if by_compiled_code() else "Python, which takes ten times as long (-v says why)"
    )
    optional = {name: _version(name) for name in _OPTIONAL}
    missing = [f"{name}: {use}" for name, use in _OPTIONAL.items() if optional[name] is None]
    if not tells_of_attributes():
        missing.insert(0, "Python 3.13.1 or later: with 3.13.0 each call has to look at all of a model")
    return {
        "torch_nimble": torch_nimble.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "required": {name: _version(name) for name in _REQUIRED},
        "optional": optional,
        "engine": engine,
        "weights": weights,
        "missing": missing,
    }


def show(findings: dict[str, Any], console: Console) -> None:
    """The findings for people."""
    grid = Table.grid(padding=(0, 2))
    rows = [
        ("torch-nimble", findings["torch_nimble"]),
        ("Python", f"{findings['python']} on {findings['platform']}"),
        ("CPU cores", str(findings["cores"])),
        ("GPUs", ", ".join(findings["gpus"]) or "none"),
        *((name, version or "not installed") for name, version in findings["required"].items()),
        *((name, version or "not installed") for name, version in findings["optional"].items()),
        ("will use", findings["engine"]),
        ("looks at weights by", findings["weights"]),
        *(("missing", line) for line in findings["missing"]),
    ]
    for label, value in rows:
        grid.add_row(label, escape(value))
    console.print(grid)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
