"""How each network of the zoo is built, what its inputs look like, and how it is calibrated.

One recipe per name. Three generators are derived from the seed, for weights, example inputs and
calibration, so that a different batch or resolution does not change the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torch_nimble.errors import OptionError
from torch_nimble.tree import flatten_inputs, unflatten_inputs
from torch_nimble.zoo import (
    Network,
    darts,
    decoder,
    ensemble,
    experts,
    inputs,
    libraries,
    nasnet,
    random_wired,
    recommender,
    unet,
    weights,
)

_CALIBRATION_BATCHES = 2
_CALIBRATION_SAMPLES = 4


@dataclass(frozen=True)
class Recipe:
    """How to build a network: `build` takes the resolution, by default the published one.

    `calibrated` marks networks with logits, which `weights.calibrate` can treat.
    """

    build: Callable[[int], nn.Module]
    inputs: Callable[[torch.Generator, int, int], inputs.Inputs]
    resolution: int
    smallest: int = 32
    largest: int | None = None
    library: str | None = None
    calibrated: bool = False


def _own(build: Callable[[], nn.Module], resolution: int) -> Recipe:
    return Recipe(lambda _: build(), inputs.image, resolution, calibrated=True)


def _torchvision(name: str, resolution: int, smallest: int = 32) -> Recipe:
    return Recipe(
        lambda _: libraries.build_torchvision(name),
        inputs.image,
        resolution,
        smallest=smallest,
        library="torchvision",
        calibrated=True,
    )


RECIPES: dict[str, Recipe] = {
    "nasnet-a-mobile": _own(lambda: nasnet.NasnetA(nasnet.MOBILE), 224),
    "nasnet-a-large": _own(lambda: nasnet.NasnetA(nasnet.LARGE), 331),
    "darts": _own(lambda: darts.DartsImageNet(darts.DARTS_V2), 224),
    "amoebanet": _own(lambda: darts.DartsImageNet(darts.AMOEBANET), 224),
    "random-wired": _own(random_wired.RandomWired, 224),
    "resnet50": _torchvision("resnet50", 224),
    "resnet101": _torchvision("resnet101", 224),
    "inception-v3": _torchvision("inception_v3", 299, smallest=75),
    "googlenet": _torchvision("googlenet", 224),
    "mobilenet-v2": _torchvision("mobilenet_v2", 224),
    "efficientnet-b0": _torchvision("efficientnet_b0", 224),
    "efficientnet-b5": _torchvision("efficientnet_b5", 456),
    "bert-base": Recipe(
        lambda _: libraries.build_bert(), inputs.bert_tokens, 128, 1, largest=512, library="transformers"
    ),
    "gpt2": Recipe(
        lambda _: libraries.build_gpt2(), inputs.gpt2_tokens, 64, 1, largest=1024, library="transformers"
    ),
    "vit-b16": Recipe(libraries.build_vit, inputs.pixel_values, 224, 16, library="transformers"),
    "gpt2-decode": Recipe(
        lambda _: decoder.DecodeStep(), inputs.decode_step, 256, 1, largest=decoder.POSITIONS
    ),
    "convnext-tiny": _torchvision("convnext_tiny", 224),
    "swin-tiny": _torchvision("swin_t", 224),
    "unet": Recipe(lambda _: unet.Unet(), inputs.noisy_latent, 32, 8),
    "recommender": Recipe(
        lambda _: recommender.Recommender(),
        inputs.features,
        recommender.CATEGORIES,
        smallest=recommender.CATEGORIES,
        largest=recommender.CATEGORIES,
        calibrated=True,
    ),
    "mixture-of-experts": Recipe(lambda _: experts.MixtureOfExperts(), inputs.hidden_states, 64, 1),
    "ensemble": _own(ensemble.Ensemble, 32),
}


def _generator(seed: int, purpose: int) -> torch.Generator:
    return torch.Generator().manual_seed(3 * seed + purpose)


def _calibrate(model: nn.Module, recipe: Recipe, generator: torch.Generator, resolution: int) -> None:
    # Not smaller than the inputs to come: the share of padded pixels in a map depends on its size,
    # and deep networks amplify the difference (EfficientNet-B5: logits 1000 times larger).
    where = next(model.parameters()).device
    drawn = (
        recipe.inputs(generator, _CALIBRATION_SAMPLES, resolution)[0]
        for _ in range(_CALIBRATION_BATCHES)
    )
    batches = [tuple(tensor.to(where) for tensor in batch) for batch in drawn]
    for classifier in model.members if isinstance(model, ensemble.Ensemble) else [model]:
        weights.calibrate(classifier, batches)


def _check_sizes(name: str, recipe: Recipe, batch: int, resolution: int) -> None:
    if batch < 1:
        raise OptionError(f"batch must be at least 1, not {batch}")
    if resolution < recipe.smallest:
        raise OptionError(
            f"resolution {resolution} is too small for {name}: give {recipe.smallest} or more"
        )
    if recipe.largest is not None and resolution > recipe.largest:
        raise OptionError(
            f"resolution {resolution} is too large for {name}: give {recipe.largest} or less"
        )


def build_network(
    name: str,
    *,
    seed: int,
    batch: int,
    resolution: int | None,
    calibrate: bool,
    device: torch.device | str,
) -> Network:
    """Build the network of a canonical name; see `torch_nimble.zoo.load`."""
    recipe = RECIPES[name]
    resolution = recipe.resolution if resolution is None else resolution
    _check_sizes(name, recipe, batch, resolution)
    # Constructors may draw from the global generator, even though all they draw is replaced.
    with torch.random.fork_rng(devices=[]), weights.skip_random_fills():
        model = recipe.build(resolution).eval()
    weights.fill_weights(model, _generator(seed, 0))
    model.to(device)
    if calibrate and recipe.calibrated:
        _calibrate(model, recipe, _generator(seed, 1), resolution)
    tensors, structure = flatten_inputs(*recipe.inputs(_generator(seed, 2), batch, resolution))
    args, kwargs = unflatten_inputs(structure, [tensor.to(device) for tensor in tensors])
    source = "torch_nimble" if recipe.library is None else libraries.library_version(recipe.library)
    return Network(name=name, model=model, args=tuple(args), kwargs=kwargs, source=source)
