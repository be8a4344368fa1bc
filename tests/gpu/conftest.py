"""Settings of the GPU tests: skipped, with the reason, where there is no GPU; flags in a known state."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# torch describes every step of an export to this logger as soon as anybody, such as pytest, listens.
logging.getLogger("torch.__trace").propagate = False

_HERE = Path(__file__).parent
# Advice and deprecations from torch's own insides; what this package warns of stays an error.
_IGNORED = (
    "ignore:TensorFloat32 tensor cores",
    "ignore:Please use the new API settings to control TF32",
    r"ignore::UserWarning:torch\.",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    """Where the package runs from its source tree, say what an installation would say of it.

    torch finds the backend by that, and on a machine with a GPU packages can perhaps not be installed.
    """
    try:
        importlib.metadata.distribution("torch-nimble")
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((_HERE.parents[1] / "pyproject.toml").read_text())["project"]
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        told = Path(folder.name, f"torch_nimble-{project['version']}.dist-info")
        told.mkdir()
        (told / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
        points = (
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
            for group, named in project["entry-points"].items()
        )
        (told / "entry_points.txt").write_text("\n".join(points))
        sys.path.append(folder.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    for item in items:
        if _HERE not in item.path.parents:
            continue
        for line in _IGNORED:
            item.add_marker(pytest.mark.filterwarnings(line))
        if not has_gpu:
            reason = f"needs a CUDA GPU; torch {torch.__version__} sees none on this machine"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def _no_tf32() -> Iterator[None]:
    """Products of float32 at full precision, in eager and in the engine; restored afterwards."""
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = False
    yield
    for flag, value in zip(flags, before, strict=True):
        flag.allow_tf32 = value


@pytest.fixture
def allocated() -> Callable[[], int]:
    """Bytes that tensors take on the GPU now, after all that nobody refers to is gone."""

    def now() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # those of tests before this one go at any time
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    return now
