"""Networks that torchvision and transformers have, built from their code with nothing downloaded.

Both libraries are optional and imported when needed. A torchvision built for CUDA next to a CPU
build of torch cannot load its compiled operators, and then fails to import because it describes two
of them to torch; `import_torchvision` declares those two (no network here calls them) and imports
again. transformers imports torchvision by itself where it is installed, so the same repair must
come first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import torch
from torch import nn

from torch_nimble.errors import MissingDependencyError

_ABSENT_OPERATOR = "operator torchvision::nms does not exist"
# The declarations vanish with this object, so it lives as long as the process.
_declarations: list[torch.library.Library] = []


def _import_library(name: str) -> ModuleType:
    library = name.split(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != library:
            raise
        raise MissingDependencyError(
            f"this network comes from {library}, which is not installed: pip install {library}"
        ) from error


def _declare_absent_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    _declarations.append(library)


def import_torchvision() -> ModuleType:
    """torchvision, also where its compiled operators cannot be loaded."""
    try:
        return _import_library("torchvision")
    except RuntimeError as error:
        if _ABSENT_OPERATOR not in str(error):
            raise
    # What a failed import leaves behind would be taken for the finished library.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _declare_absent_operators()
    return _import_library("torchvision")


def import_transformers() -> ModuleType:
    """transformers, after torchvision has been repaired if it is there."""
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    return _import_library("transformers")


def library_version(name: str) -> str:
    """The library and its version, as in "torchvision 0.28.0"."""
    return f"{name} {importlib.metadata.version(name)}"


def build_torchvision(name: str) -> nn.Module:
    """A classifier of torchvision by torchvision's name, without auxiliary heads."""
    options: dict[str, bool] = {}
    if name in ("inception_v3", "googlenet"):
        options = {"aux_logits": False, "transform_input": False, "init_weights": False}
    model: nn.Module = getattr(import_torchvision().models, name)(weights=None, **options)
    return model


def build_bert() -> nn.Module:
    """BERT base, uncased vocabulary, without a task head."""
    transformers = import_transformers()
    model: nn.Module = transformers.BertModel(transformers.BertConfig())
    return model


def build_gpt2() -> nn.Module:
    """GPT-2 (124 M), without the language-model head and without a cache of keys and values."""
    transformers = import_transformers()
    model: nn.Module = transformers.GPT2Model(transformers.GPT2Config(use_cache=False))
    return model


def build_vit(image_side: int) -> nn.Module:
    """ViT base with patches of 16 pixels, for images of that side, without a task head."""
    transformers = import_transformers()
    model: nn.Module = transformers.ViTModel(transformers.ViTConfig(image_size=image_side))
    return model
