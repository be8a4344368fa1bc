"""The zoo: names, published sizes, reproducibility, and outputs that are worth comparing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import nn

from torch_nimble import zoo
from torch_nimble.errors import MissingDependencyError, OptionError, UnknownNetworkError
from torch_nimble.zoo import libraries
from torch_nimble.zoo.darts import AMOEBANET, DARTS_V2, DartsImageNet
from torch_nimble.zoo.loading import RECIPES
from torch_nimble.zoo.nasnet import LARGE, MOBILE, NasnetA, NasnetSize
from torch_nimble.zoo.random_wired import RandomWired, draw_wiring, final_nodes
from torch_nimble.zoo.weights import calibrate, fill_weights

OWN = ("nasnet-a-mobile", "darts", "amoebanet", "random-wired")
TORCHVISION = ("resnet50", "inception-v3", "googlenet", "mobilenet-v2", "efficientnet-b0")
TRANSFORMERS = {"bert-base": 16, "gpt2": 16, "vit-b16": 64}
SMALL = 96
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other slow these small networks tenfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def first_output(network: zoo.Network, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    model = network.model.to(dtype)
    with torch.no_grad():
        output = model(*map(cast, network.args), **{key: cast(v) for key, v in network.kwargs.items()})
    return (output if isinstance(output, torch.Tensor) else output[0]).float()


def with_inputs_of(network: zoo.Network, other: zoo.Network) -> zoo.Network:
    return zoo.Network(network.name, network.model, other.args, other.kwargs, network.source)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def assert_worth_comparing(name: str, resolution: int) -> None:
    network = zoo.load(name, resolution=resolution)
    other = zoo.load(name, resolution=resolution, seed=1, calibrate=False)
    output = first_output(network)
    assert not network.model.training
    assert output.isfinite().all()
    assert 0.1 < float(output.std()) < 10
    assert relative_difference(first_output(with_inputs_of(network, other)), output) > 0.05


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("ResNet-50", "resnet50"),
        ("inception_v3", "inception-v3"),
        ("NASNet-A mobile", "nasnet-a-mobile"),
        ("ViT.B16", "vit-b16"),
        ("GPT-2", "gpt2"),
    ],
)
def test_spelling_does_not_matter(spelling: str, canonical: str) -> None:
    assert zoo.resolve(spelling) == canonical


def test_every_name_resolves_to_itself_and_has_a_recipe() -> None:
    assert [zoo.resolve(name) for name in zoo.NAMES] == list(zoo.NAMES)
    assert tuple(RECIPES) == zoo.NAMES


def test_unknown_name_says_what_was_meant_and_what_exists() -> None:
    with pytest.raises(UnknownNetworkError) as caught:
        zoo.resolve("nasnet-b-mobile")
    message = str(caught.value)
    assert "'nasnet-b-mobile'" in message
    assert "Did you mean nasnet-a-mobile" in message
    assert all(name in message for name in zoo.NAMES)


def test_listing_names_does_not_import_torch() -> None:
    code = "import sys; from torch_nimble import zoo; zoo.NAMES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "batch", "resolution"), [("darts", 0, 64), ("inception-v3", 1, 74), ("gpt2", 1, 1025)]
)
def test_impossible_sizes_are_refused(name: str, batch: int, resolution: int) -> None:
    with pytest.raises(OptionError, match=r"at least 1|too small|too large"):
        zoo.load(name, batch=batch, resolution=resolution)


# --- structure -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: NasnetA(MOBILE), 5_289_978),
        (lambda: NasnetA(LARGE), 88_753_150),
        (lambda: DartsImageNet(DARTS_V2), 4_718_752),
        (lambda: DartsImageNet(AMOEBANET), 4_627_360),
        (RandomWired, 5_651_918),
    ],
)
def test_parameter_counts(model: type[nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert parameter_count(model()) == count


def test_nasnet_large_computes_what_timm_computes() -> None:
    """A narrow copy; at 67 pixels all maps have odd sides, where both pad alike."""
    if HAS_TORCHVISION:
        libraries.import_torchvision()  # timm imports it, and would fail where it needs the repair
    timm_nasnet = pytest.importorskip("timm.models.nasnet")
    width = 8
    theirs = timm_nasnet.NASNetALarge(num_classes=10, stem_size=12, num_features=24 * width).eval()
    count_only_real_pixels(theirs)
    generator = torch.Generator().manual_seed(0)
    fill_weights(theirs, generator)
    calibrate(theirs, [torch.randn(8, 3, 67, 67, generator=generator)])
    size = NasnetSize(stem_width=12, width=width, cells_per_stage=6, skip_reduction_input=True)
    ours = NasnetA(size, classes=10).eval()
    names = ["conv0", "cell_stem_0", "cell_stem_1"]
    for stage in range(3):
        names += [f"reduction_cell_{stage - 1}"] if stage else []
        names += [f"cell_{6 * stage + i}" for i in range(6)]
    copy_state(getattr(theirs, names[0]), ours.stem)
    for name, cell in zip(names[1:], ours.stack.cells, strict=True):
        copy_timm_cell(getattr(theirs, name), cell)
    copy_state(theirs.last_linear, ours.classifier)
    images = torch.randn(2, 3, 67, 67, generator=generator)
    with torch.no_grad():
        expected = theirs(images)
        assert relative_difference(expected[:1], expected[1:]) > 0.05
        torch.testing.assert_close(ours(images), expected, rtol=1e-3, atol=1e-4)


def count_only_real_pixels(model: nn.Module) -> None:
    """timm's strided average pools count the padding, unlike the published network."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "AvgPool2dSame":
                setattr(module, name, nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False))


def copy_state(source: nn.Module, target: nn.Module) -> None:
    values = list(source.state_dict().values())
    target.load_state_dict(dict(zip(target.state_dict(), values, strict=True)))


def copy_timm_cell(source: nn.Module, target: nn.Module) -> None:
    copy_state(source.conv_1x1, target.prepare_newer)
    if hasattr(source, "path_1"):
        copy_state(source.path_1.conv, target.prepare_older.even)
        copy_state(source.path_2.conv, target.prepare_older.odd)
        copy_state(source.final_path_bn, target.prepare_older.norm)
    elif hasattr(source, "conv_prev_1x1"):
        copy_state(source.conv_prev_1x1, target.prepare_older)
    for index, operator in enumerate(target.operators):
        if list(operator.parameters()):
            copy_state(
                getattr(source, f"comb_iter_{index // 2}_{('left', 'right')[index % 2]}"), operator
            )


def test_wiring_is_reproducible_and_acyclic() -> None:
    wiring = draw_wiring(Random(3), 32, 4, 0.75)
    assert wiring == draw_wiring(Random(3), 32, 4, 0.75)
    assert wiring != draw_wiring(Random(4), 32, 4, 0.75)
    assert sum(map(len, wiring)) == 32 * 4 // 2
    assert all(source < node for node, sources in enumerate(wiring) for source in sources)
    assert 31 in final_nodes(wiring)


def test_wiring_without_rewiring_is_the_ring() -> None:
    assert draw_wiring(Random(0), 6, 2, 0.0) == ((), (0,), (1,), (2,), (3,), (0, 4))


def test_wiring_is_the_same_for_every_seed_of_the_weights() -> None:
    stages = [zoo.load("random-wired", seed=seed, calibrate=False).model.stages for seed in (0, 1)]
    assert [stage.wiring for stage in stages[0]] == [stage.wiring for stage in stages[1]]


# --- weights and inputs --------------------------------------------------------------------------


def test_seed_decides_weights_and_inputs_bitwise() -> None:
    first, again, other = (zoo.load("darts", seed=seed, resolution=64) for seed in (5, 5, 6))
    state, same, different = (network.model.state_dict() for network in (first, again, other))
    assert all(torch.equal(state[key], same[key]) for key in state)
    assert torch.equal(first.args[0], again.args[0])
    assert not torch.equal(first.args[0], other.args[0])
    weights = [key for key in state if state[key].dim() > 1]
    assert not any(torch.equal(state[key], different[key]) for key in weights)


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    zoo.load("random-wired", resolution=64)
    assert torch.equal(before, torch.get_rng_state())


def test_batch_and_resolution_shape_the_inputs() -> None:
    network = zoo.load("darts", batch=3, resolution=64, calibrate=False)
    assert network.args[0].shape == (3, 3, 64, 64)
    assert network.source == "torch_nimble"


@pytest.mark.parametrize("name", OWN)
def test_own_networks_give_sane_outputs_that_depend_on_the_input(name: str) -> None:
    assert_worth_comparing(name, SMALL)


def test_calibration_restores_the_norms() -> None:
    network = zoo.load("darts", resolution=64)
    norms = [module for module in network.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.momentum for norm in norms} == {0.1}
    assert not any(module.training for module in network.model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["nasnet-a-mobile", "darts"])
def test_low_precision_stays_near_float32(name: str, dtype: torch.dtype) -> None:
    network = zoo.load(name, resolution=SMALL)
    reference = first_output(network)
    output = first_output(network, dtype)
    assert output.isfinite().all()
    assert relative_difference(output, reference) < 0.15


def test_nasnet_exports() -> None:
    network = zoo.load("nasnet-a-mobile", resolution=64)
    exported = torch.export.export(network.model, network.args, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(*network.args), network.model(*network.args))


# --- libraries -----------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision is not installed")
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_networks(name: str) -> None:
    assert_worth_comparing(name, SMALL)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
@pytest.mark.parametrize(("name", "resolution"), TRANSFORMERS.items())
def test_transformers_networks(name: str, resolution: int) -> None:
    before = torch.get_rng_state()
    assert_worth_comparing(name, resolution)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision is not installed")
def test_library_networks_are_reproducible_and_name_their_source() -> None:
    first, again = (zoo.load("mobilenet-v2", resolution=64) for _ in range(2))
    state, same = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(state[key], same[key]) for key in state)
    assert first.source.startswith("torchvision ")


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(MissingDependencyError, match=r"torch-nimble\[zoo\]"):
        zoo.load("resnet50")
