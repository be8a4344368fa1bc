"""The zoo: names, published sizes, reproducibility, and outputs that are worth comparing."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional

from cpu.helpers import assert_matches_eager
from torch_nimble import zoo
from torch_nimble.errors import MissingDependencyError, OptionError, UnknownNetworkError
from torch_nimble.zoo import libraries
from torch_nimble.zoo.darts import AMOEBANET, DARTS_V2, DartsImageNet
from torch_nimble.zoo.decoder import DecodeStep
from torch_nimble.zoo.ensemble import Ensemble, MemberSize
from torch_nimble.zoo.experts import Experts, MixtureOfExperts, gate
from torch_nimble.zoo.inputs import draw_images
from torch_nimble.zoo.loading import RECIPES
from torch_nimble.zoo.nasnet import LARGE, MOBILE, NasnetA, NasnetSize
from torch_nimble.zoo.random_wired import RandomWired, draw_wiring, final_nodes
from torch_nimble.zoo.recommender import Recommender
from torch_nimble.zoo.unet import Unet, embed_timesteps
from torch_nimble.zoo.weights import calibrate, fill_weights

OWN = {
    "nasnet-a-mobile": 96,
    "darts": 96,
    "amoebanet": 96,
    "random-wired": 96,
    "gpt2-decode": 32,
    "unet": 8,
    "recommender": 26,
    "mixture-of-experts": 16,
    "ensemble": 32,
}
TORCHVISION = (
    "resnet50",
    "inception-v3",
    "googlenet",
    "mobilenet-v2",
    "efficientnet-b0",
    "convnext-tiny",
    "swin-tiny",
)
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
    assert 0.01 < float(output.std()) < 10
    assert relative_difference(first_output(with_inputs_of(network, other)), output) > 0.5


def filled(model: nn.Module) -> nn.Module:
    fill_weights(model, torch.Generator().manual_seed(0))
    return model.eval()


def small_decoder() -> DecodeStep:
    return filled(DecodeStep(layers=2, heads=2, head_width=8, vocabulary=50, positions=16))


def small_unet() -> Unet:
    return filled(Unet(widths=(32, 64)))


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
    ("name", "batch", "resolution"),
    [
        ("darts", 0, 64),
        ("inception-v3", 1, 74),
        ("gpt2", 1, 1025),
        ("gpt2-decode", 1, 1025),
        ("recommender", 1, 25),
    ],
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
        (DecodeStep, 124_439_808),
        (Unet, 43_444_228),
        (Recommender, 17_143_376),
        (MixtureOfExperts, 18_916_352),
        (Ensemble, 4_168_560),
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
    calibrate(theirs, [(torch.randn(8, 3, 67, 67, generator=generator),)])
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


def test_inputs_are_decided_by_their_generator_alone() -> None:
    before = torch.get_rng_state()
    for name, recipe in RECIPES.items():
        drawn = []
        for seed in (0, 0, 1):
            generator = torch.Generator().manual_seed(seed)
            args, kwargs = recipe.inputs(generator, 2, recipe.smallest)
            drawn.append([*args, *kwargs.values()])
        first, again, other = drawn
        assert all(map(torch.equal, first, again)), name
        assert not all(map(torch.equal, first, other)), name
    assert torch.equal(before, torch.get_rng_state())


def test_images_have_unit_variance_and_a_colour_of_their_own() -> None:
    images = draw_images(torch.Generator().manual_seed(0), 64, 32)
    assert abs(float(images.mean())) < 0.1
    assert 0.8 < float(images.var()) < 1.2
    assert float(images.mean((2, 3)).std()) > 0.5  # of white noise: 1/32


@pytest.mark.parametrize(("name", "resolution"), OWN.items())
def test_own_networks_give_sane_outputs_that_depend_on_the_input(name: str, resolution: int) -> None:
    assert_worth_comparing(name, resolution)


def test_calibration_centres_and_scales_the_logits() -> None:
    model = filled(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(16, 5, generator=generator),) for _ in range(2)]
    calibrate(model, batches)
    with torch.no_grad():
        logits = torch.cat([model(*batch) for batch in batches])
    torch.testing.assert_close(logits.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.std(), torch.tensor(1.0))


def test_calibration_restores_the_norms() -> None:
    network = zoo.load("darts", resolution=64)
    norms = [module for module in network.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.momentum for norm in norms} == {0.1}
    assert not any(module.training for module in network.model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        "nasnet-a-mobile",
        "darts",
        "gpt2-decode",
        "unet",
        "recommender",
        "mixture-of-experts",
        "ensemble",
    ],
)
def test_low_precision_stays_near_float32(name: str, dtype: torch.dtype) -> None:
    network = zoo.load(name, resolution=OWN[name])
    reference = first_output(network)
    output = first_output(network, dtype)
    assert output.isfinite().all()
    assert relative_difference(output, reference) < 0.15


def test_nasnet_exports() -> None:
    network = zoo.load("nasnet-a-mobile", resolution=64)
    exported = torch.export.export(network.model, network.args, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(*network.args), network.model(*network.args))


# --- one step of a decoder -----------------------------------------------------------------------


def logits_without_cache(model: DecodeStep, tokens: torch.Tensor) -> torch.Tensor:
    """All tokens at once, with a causal mask, and the weights of the step."""
    x = model.token_embedding(tokens) + model.position_embedding.weight[: tokens.shape[1]]
    for layer in model.layers:
        attention = layer.attention
        projected = attention.project_in(layer.norm_attention(x))
        query, key, value = (
            each.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for each in projected.chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + attention.project_out(seen.transpose(1, 2).flatten(2))
        x = x + layer.feed(layer.norm_feed(x))
    return model.norm(x) @ model.token_embedding.weight.T


def decode(
    model: DecodeStep, tokens: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits of every step, and the cache after them; what was in the cache is never seen."""
    shape = (len(model.layers), len(tokens), model.layers[0].attention.heads, length, 8)
    keys, values = torch.randn(shape), torch.randn(shape)
    steps = []
    for position in range(tokens.shape[1]):
        logits, key, value = model(
            tokens[:, position], torch.full((len(tokens),), position), keys, values
        )
        keys[..., position, :], values[..., position, :] = key, value
        steps.append(logits)
    return torch.stack(steps, dim=1), keys, values


def test_decode_steps_compute_what_a_pass_without_cache_computes() -> None:
    model = small_decoder()
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = logits_without_cache(model, tokens)
        steps, keys, values = decode(model, tokens, length=12)
        torch.testing.assert_close(steps, expected)
        assert relative_difference(steps[:, 7], steps[:, 8]) > 0.5
        # Sequences of which one has come further than the other.
        mixed, _, _ = model(tokens[[0, 1], [3, 8]], torch.tensor([3, 8]), keys, values)
        torch.testing.assert_close(mixed, expected[[0, 1], [3, 8]])


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
def test_decode_steps_compute_what_gpt2_of_transformers_computes() -> None:
    transformers = libraries.import_transformers()
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    theirs = filled(transformers.GPT2LMHeadModel(config))
    ours = small_decoder()
    # Their layers store the transpose of what nn.Linear does.
    state = theirs.transformer.state_dict()
    values = [value.T if ".c_" in key and value.dim() == 2 else value for key, value in state.items()]
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(decode(ours, tokens, length=9)[0], theirs(tokens).logits)


# --- the other networks of our own ---------------------------------------------------------------


def test_unet_keeps_odd_sizes_and_depends_on_both_inputs() -> None:
    model = small_unet()
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 7, 9, generator=generator)
    early, late = torch.tensor([10, 10]), torch.tensor([900, 900])
    with torch.no_grad():
        noise = model(latents, early)
        assert noise.shape == latents.shape
        assert relative_difference(noise[:1], noise[1:]) > 0.5
        assert relative_difference(model(latents, late), noise) > 0.1


def test_timesteps_are_embedded_as_cosines_and_sines() -> None:
    embedded = embed_timesteps(torch.tensor([0, 999]), 8)
    angles = torch.tensor([0.0, 999.0])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(embedded, torch.cat([angles.cos(), angles.sin()], 1), atol=1e-4, rtol=0)


def test_recommender_multiplies_every_pair_once() -> None:
    model = filled(Recommender(rows=20))
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 13, generator=generator)
    categories = torch.randint(20, (3, 26), generator=generator)
    with torch.no_grad():
        summary = model.bottom(numbers)
        vectors = [summary, *(table(categories[:, i]) for i, table in enumerate(model.tables))]
        pairs = [(a * b).sum(1, keepdim=True) for a, b in itertools.combinations(vectors, 2)]
        expected = model.top(torch.cat([summary, *pairs], 1))
        torch.testing.assert_close(model(numbers, categories), expected)


def test_gates_choose_the_two_best_experts_and_are_continuous() -> None:
    scores = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    weights = gate(scores)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(2).indices, True)
    assert torch.equal(weights > 0, chosen)
    assert (weights.sum(1) < 1).all()
    second_wins, third_wins = torch.tensor([[2.0, 1.001, 1.0, 0.0], [2.0, 1.0, 1.001, 0.0]])
    torch.testing.assert_close(gate(second_wins), gate(third_wins), atol=2e-3, rtol=0)


def test_experts_are_summed_by_their_weights() -> None:
    model = filled(Experts(width=6, experts=4))
    tokens = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weights = gate(model.router(tokens))
        expected = [
            sum(weight * expert(token) for weight, expert in zip(row, model.experts, strict=True))
            for token, row in zip(tokens, weights, strict=True)
        ]
        torch.testing.assert_close(model(tokens), torch.stack(expected))


def test_ensemble_averages_sure_members() -> None:
    network = zoo.load("ensemble", batch=4)
    with torch.no_grad():
        logits = [member(*network.args) for member in network.model.members]
        average = network.model(*network.args)
    assert all(0.5 < float(each.std()) < 2 for each in logits)
    torch.testing.assert_close(average.sum(1), torch.ones(4))
    assert all(float(each.max()) > 1 / 16 for each in average)


TINY: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]], int]] = {
    "decoder": (
        small_decoder,
        lambda: (
            torch.randint(50, (2,)),
            torch.randint(8, (2,)),
            *(torch.randn(2, 2, 2, 8, 8) for _ in range(2)),
        ),
        2,
    ),
    "unet": (small_unet, lambda: (torch.randn(1, 4, 8, 8), torch.randint(1000, (1,))), 2),
    "recommender": (
        lambda: filled(Recommender(rows=20)),
        lambda: (torch.randn(2, 13), torch.randint(20, (2, 26))),
        27,
    ),
    "experts": (
        lambda: filled(MixtureOfExperts(blocks=1, width=16, heads=2)),
        lambda: (torch.randn(1, 4, 16),),
        8,
    ),
    "ensemble": (
        lambda: filled(Ensemble((MemberSize(4, 1), MemberSize(6, 1)), classes=5)),
        lambda: (torch.randn(2, 3, 8, 8),),
        2,
    ),
}


@pytest.mark.parametrize("name", TINY)
def test_engine_gives_what_eager_gives(name: str) -> None:
    make, inputs, streams = TINY[name]
    assert_matches_eager(make(), inputs, least_streams=streams, only=("max-concurrency",))


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
    with pytest.raises(MissingDependencyError, match="pip install torchvision"):
        zoo.load("resnet50")
