"""Which layers kernels are chosen for, what becomes part of them, and that values stay eager's.

Our kernels need a GPU. Here a plain implementation of their operator stands in for them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from cpu.helpers import Model, assert_close, eager, randomise_batch_norm
from cpu.kernel_cases import ACTIVATIONS as FUNCTIONS
from cpu.kernel_cases import stand_in
from torch_nimble.capture import Adapter, AutocastState, Callee, Captured
from torch_nimble.kernels.operator import lay_out, may_round
from torch_nimble.kernels.sites import (
    ACTIVATIONS,
    BEFORE,
    LIBRARY,
    MERGED,
    OF_ROWS,
    Site,
    Way,
    Window,
    configs,
)
from torch_nimble.lower.constants import split_constants
from torch_nimble.lower.inductor import find_layers
from torch_nimble.lower.observe import observe
from torch_nimble.lower.passes import layers as layers_pass
from torch_nimble.lower.passes import run_passes, select
from torch_nimble.lower.program import resolve
from torch_nimble.taskgraph import Layout
from torch_nimble.tree import flatten_inputs

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu_,
    "relu6": nn.ReLU6(inplace=True),
    "silu": nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "sigmoid": torch.sigmoid_,
}


@pytest.fixture(autouse=True, scope="module")
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    """Put torch's flags for TF32 back, which some tests set."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    let_round(convolutions=False, products=False)
    yield
    let_round(*before)


def let_round(convolutions: bool, products: bool) -> None:
    """Set torch's flags for TF32; they are put back after each test."""
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.matmul.allow_tf32 = products


# -------------------------------------------------------------------- rewritten graphs


@dataclass
class Rewritten:
    """A graph with our operator for every site, and what was found."""

    captured: Captured
    graph: fx.Graph
    sites: list[Site]
    counts: dict[str, int]

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """The graph on the model's tensors."""
        names = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        values = self._values(*inputs)
        module = fx.GraphModule(self.captured.owner, self.graph)
        with torch.no_grad():
            return list(fx.Interpreter(module).run(*(values[name] for name in names)))

    def run_split(self, *inputs: Tensor) -> list[Tensor]:
        """What depends on constants first, as it is folded; then the rest, as it is compiled."""
        split = split_constants(self.captured, self.graph)
        values = self._values(*inputs)
        with torch.no_grad():
            for call in split.folding:
                args, kwargs = resolve((call.args, dict(call.kwargs)), values)
                values[call.name] = call.target(*args, **kwargs)
            module = fx.GraphModule(self.captured.owner, split.graph)
            return list(fx.Interpreter(module).run(*(values[name] for name in split.given)))

    def _values(self, *inputs: Tensor) -> dict[str, Any]:
        given = dict(zip(self.captured.inputs, inputs, strict=True))
        return given | {name: source.tensor() for name, source in self.captured.constants.items()}

    @property
    def ours(self) -> list[fx.Node]:
        """Our operator, wherever it is."""
        target = torch.ops.torch_nimble.convolve.default
        return list(self.graph.find_nodes(op="call_function", target=target))

    def count(self, name: str) -> int:
        """How many operators of that name are left."""
        return sum(f"aten.{name}." in str(node.target) for node in self.graph.nodes)


def captured_of(model: Any, *inputs: Tensor, autocast: AutocastState | None = None) -> Captured:
    tensors, structure = flatten_inputs(inputs, {})
    with torch.no_grad():
        return Adapter(Callee(model), structure, autocast).capture(tensors, functional=False)


def passed(captured: Captured, layout: Layout = "channels-last") -> tuple[fx.Graph, frozenset[str]]:
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    names = frozenset(captured.constants) - captured.mutated
    run_passes(graph, names, layout, fused=True)
    return graph, names


def rewritten(captured: Captured, layout: Layout = "channels-last") -> Rewritten:
    """The graph after all passes, with the first config for every site."""
    graph, names = passed(captured, layout)
    sites = [found.site for found in layers_pass.find_sites(graph, names)]
    before = str(graph)
    assert select.use_kernels(graph, names, {}) == {}
    assert str(graph) == before
    chosen = {str(site): configs(site, "fast")[0] for site in sites}
    counts = select.use_kernels(graph, names, chosen)
    graph.lint()
    made = Rewritten(captured, graph, sites, counts)
    assert counts == Counter(map(str, sites))
    assert len(made.ours) == len(sites)
    graph.eliminate_dead_code()
    return made


def find_sites(captured: Captured) -> Counter[Site]:
    """Layers as they are tried."""
    sites, _ = find_layers(captured)
    return sites


def as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def assert_keeps(
    model: Any, *inputs: Tensor, tolerance: float | None = None, may_vanish: bool = False
) -> Rewritten:
    """The rewritten graph gives what eager gives, on inputs that it was not made with."""
    made = rewritten(captured_of(model, *inputs))
    fresh = [torch.randn_like(x) for x in inputs]
    wanted = as_list(eager(model, *(x.clone() for x in fresh)))
    assert may_vanish or any(tensor.abs().max() > 0 for tensor in wanted)
    assert_close(made.run(*(x.clone() for x in fresh)), wanted, tolerance)
    assert_close(made.run_split(*(x.clone() for x in fresh)), wanted, tolerance)
    return made


Ends = tuple[str, bool, str]
"""What is part of a site: the activation before, whether something is added, the activation after."""


def ends_of(made: Rewritten) -> list[Ends]:
    return [(site.before, site.adds, site.after) for site in made.sites]


ALONE: Ends = ("", False, "")


def image(channels: int = 4, side: int = 5, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, side, side)


def net(function: Callable[..., Any], **members: Any) -> Model:
    """A function of a model with some layers, and the inputs."""
    layers = {
        "conv": nn.Conv2d(4, 4, 3, padding=1),
        "other": nn.Conv2d(4, 4, 1, bias=False),
        "deep": nn.Conv2d(4, 4, 3, padding=1, groups=4),
        "linear": nn.Linear(6, 6),
    }
    return Model(function, **layers, **members).eval()


# -------------------------------------------------------------------- the layer alone

LAYERS: dict[str, tuple[Callable[[], nn.Module], Window]] = {
    "plain": (lambda: nn.Conv2d(4, 6, 3), Window((3, 3))),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), Window((3, 3))),
    "numbers": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=3, dilation=2),
        Window((3, 3), (2, 2), (3, 3), (2, 2)),
    ),
    "pairs": (
        lambda: nn.Conv2d(4, 6, (1, 3), stride=(2, 1), padding=(3, 4), dilation=(1, 2)),
        Window((1, 3), (2, 1), (3, 4), (1, 2)),
    ),
    "same padding": (lambda: nn.Conv2d(4, 6, 3, padding="same"), Window((3, 3), padding=(1, 1))),
    "same padding with dilation": (
        lambda: nn.Conv2d(4, 6, (5, 4), padding="same", dilation=(1, 2)),
        Window((5, 4), padding=(2, 3), dilation=(1, 2)),
    ),
    "valid padding": (
        lambda: nn.Conv2d(4, 6, 3, 2, padding="valid"),
        Window((3, 3), (2, 2)),
    ),
    "pointwise": (lambda: nn.Conv2d(4, 6, 1), Window((1, 1))),
    "one channel": (lambda: nn.Conv2d(4, 1, 3), Window((3, 3))),
    "depthwise": (lambda: nn.Conv2d(4, 4, 5, padding=2, groups=4), Window((5, 5), (1, 1), (2, 2))),
    "depthwise with same padding": (
        lambda: nn.Conv2d(4, 4, 7, padding="same", groups=4),
        Window((7, 7), padding=(3, 3)),
    ),
    "depthwise with pairs": (
        lambda: nn.Conv2d(4, 4, (3, 2), (1, 2), (0, 1), (2, 1), groups=4, bias=False),
        Window((3, 2), (1, 2), (0, 1), (2, 1)),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_convolution_of_images_is_a_site(name: str) -> None:
    make, window = LAYERS[name]
    layer = make()
    (site,) = assert_keeps(layer, image(side=7)).sites
    assert site == Site(
        image=(2, 4, 7, 7),
        made=layer.out_channels,
        window=window,
        dtype="float32",
        kind="depthwise" if "depthwise" in name else "dense",
        has_bias=layer.bias is not None,
    )


CALLS: dict[str, tuple[Callable[..., Tensor], Window]] = {
    "stride alone": (lambda m, x: F.conv2d(x, m.w, stride=2), Window((3, 2), (2, 2))),
    "padding alone": (lambda m, x: F.conv2d(x, m.w, padding=(2, 1)), Window((3, 2), padding=(2, 1))),
    "dilation alone": (
        lambda m, x: F.conv2d(x, m.w, dilation=(1, 2)),
        Window((3, 2), dilation=(1, 2)),
    ),
    "a word alone": (
        lambda m, x: F.conv2d(x, m.w[:, :, :, :1], padding="same"),
        Window((3, 1), padding=(1, 0)),
    ),
    "groups alone": (lambda m, x: F.conv2d(x, m.deep.weight, groups=4), Window((3, 3))),
    "numbers in lists of one": (
        lambda m, x: F.conv2d(x, m.w, None, [2], [1], [2]),
        Window((3, 2), (2, 2), (1, 1), (2, 2)),
    ),
    "the general operator": (
        lambda m, x: torch.convolution(x, m.w, m.b, [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
        Window((3, 2), (2, 1), (1, 0), (1, 2)),
    ),
    "computed from parameters": (lambda m, x: F.conv2d(x, m.w.exp() - 1, m.b * 2), Window((3, 2))),
    "turned weights": (lambda m, x: F.conv2d(x, m.w.transpose(0, 1)[:, :4]), Window((3, 2))),
    "bias with gaps": (lambda m, x: F.conv2d(x, m.w, m.gaps[::2]), Window((3, 2))),
    "bias repeated": (lambda m, x: F.conv2d(x, m.w, m.gaps[:1].expand(6)), Window((3, 2))),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_may_be_given_in_all_ways(name: str) -> None:
    function, window = CALLS[name]
    model = net(
        function,
        w=nn.Parameter(torch.randn(6, 4, 3, 2)),
        b=nn.Parameter(torch.randn(6)),
        gaps=nn.Parameter(torch.randn(12)),
    )
    if name == "turned weights":
        model.w = nn.Parameter(torch.randn(4, 6, 3, 2))
    (site,) = assert_keeps(model, image()).sites
    assert site.window == window


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_are_sites_of_their_own(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()).to(dtype).eval()
    made = assert_keeps(model, image().to(dtype), tolerance=1e-2)
    assert [site.dtype for site in made.sites] == [str(dtype).removeprefix("torch.")]
    assert [tensor.dtype for tensor in made.run(image().to(dtype))] == [dtype]


def test_batch_norm_is_folded_before_sites_are_looked_for() -> None:
    norm = nn.BatchNorm2d(6)
    randomise_batch_norm(norm)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), norm, nn.ReLU()).eval()
    made = assert_keeps(model, image())
    assert ends_of(made) == [("", False, "relu")]
    assert made.sites[0].has_bias
    assert made.count("batch_norm") == made.count("relu") == 0


NORMED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 5)),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (2, 4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (2, 6, 5, 5)),
    "linear": (lambda: nn.Linear(4, 6), (9, 4)),
}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NORMED)
def test_short_weights_are_not_rounded_once_more_by_a_batch_norm(
    name: str, dtype: torch.dtype, affine: bool
) -> None:
    make, size = NORMED[name]
    norm = (nn.BatchNorm1d if name == "linear" else nn.BatchNorm2d)(6, affine=affine)
    randomise_batch_norm(norm)
    model = nn.Sequential(make(), norm, nn.ReLU()).to(dtype).eval()
    x = torch.randn(size).to(dtype)
    made = rewritten(captured_of(model, x))
    assert [site.is_scaled for site in made.sites] == [dtype != torch.float32]
    assert made.sites[0].has_bias
    exact = eager(copy.deepcopy(model).double(), x.double())
    for (result,) in (made.run(x), made.run_split(x)):
        assert_close(result, exact.to(dtype))
        differ = (result != exact.to(dtype)).double().mean()  # only what is halfway between two numbers
        assert differ <= 0.03 or dtype == torch.float32


def test_images_in_either_layout_are_taken() -> None:
    model = nn.Conv2d(4, 6, 3)
    made = assert_keeps(model, image())
    x = image().contiguous(memory_format=torch.channels_last)
    assert_close(made.run(x), [eager(model, x)])
    assert made.sites == assert_keeps(model, x).sites


def test_a_result_is_channels_last() -> None:
    (result,) = assert_keeps(nn.Conv2d(4, 6, 3), image()).run(image())
    assert result.is_contiguous(memory_format=torch.channels_last)


# -------------------------------------------------------------------- no sites

NO_SITES: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "in groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), image),
    "several of each channel": (lambda: nn.Conv2d(4, 8, 3, groups=4), image),
    "transposed": (lambda: nn.ConvTranspose2d(4, 4, 3), image),
    "transposed by the general operator": (
        lambda: net(
            lambda m, x: torch.convolution(
                x, m.conv.weight, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1
            )
        ),
        image,
    ),
    "one dimension": (lambda: nn.Conv1d(4, 4, 3), lambda: torch.randn(2, 4, 7)),
    "three dimensions": (lambda: nn.Conv3d(4, 4, 3), lambda: torch.randn(1, 4, 3, 4, 5)),
    "no batch": (lambda: nn.Conv2d(4, 4, 3), lambda: torch.randn(4, 5, 5)),
    "float64": (lambda: nn.Conv2d(4, 4, 3).double(), lambda: image().double()),
    "computed weight": (
        lambda: net(lambda m, x: F.conv2d(x, m.conv.weight * x.mean(), m.conv.bias)),
        image,
    ),
    "computed bias": (
        lambda: net(lambda m, x: F.conv2d(x, m.conv.weight, x.mean((0, 2, 3)))),
        image,
    ),
    "linear layer of float64": (
        lambda: nn.Linear(4, 4).double(),
        lambda: torch.randn(2, 4).double(),
    ),
    "linear layer of one row without a batch": (lambda: nn.Linear(4, 4), lambda: torch.randn(4)),
    "linear layer of many rows": (lambda: nn.Linear(4, 4), lambda: torch.randn(27, 19, 4)),
    "linear layer with a computed weight": (
        lambda: net(lambda m, x: F.linear(x, m.linear.weight * x.mean())),
        lambda: torch.randn(2, 6),
    ),
    "linear layer whose bias is a matrix of one row": (
        lambda: net(lambda m, x: F.linear(x, m.linear.weight, m.linear.bias[None])),
        lambda: torch.randn(3, 6),
    ),
    "linear layer whose bias is one number": (
        lambda: net(lambda m, x: F.linear(x, m.linear.weight, m.linear.bias[:1])),
        lambda: torch.randn(3, 6),
    ),
    "linear layer with a computed bias": (
        lambda: net(lambda m, x: F.linear(x, m.linear.weight, x.mean(0))),
        lambda: torch.randn(2, 6),
    ),
}


@pytest.mark.parametrize("name", NO_SITES)
def test_what_no_kernel_knows_is_no_site(name: str) -> None:
    make, make_input = NO_SITES[name]
    model, x = make(), make_input()
    assert assert_keeps(model.eval(), x).sites == []
    assert not find_sites(captured_of(model, x))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kernel", [(2, 3), (3, 4), (2, 2)])
def test_more_padding_on_one_side_than_on_the_other_is_left_to_torch(kernel: tuple[int, int]) -> None:
    model = nn.Conv2d(4, 4, kernel, padding="same")
    assert assert_keeps(model, image()).sites == []
    assert not find_sites(captured_of(model, image()))


def test_padding_by_a_word_is_the_same_layer_as_by_a_number() -> None:
    """They read one image, and so they may be one."""
    model = Model(
        lambda m, x: torch.cat([m.named(x), m.numbered(x)], 1),
        named=nn.Conv2d(4, 6, 3, padding="same"),
        numbered=nn.Conv2d(4, 5, 3, padding=1),
    ).eval()
    made = assert_keeps(model, image())
    first, second = made.sites
    assert replace(first, made=5) == second
    _, groups = find_layers(made.captured)
    ((group, count),) = groups.items()
    assert (set(group.sites), count) == ({first, second}, 1)
    kernels = {str(group): MERGED, str(group.whole): configs(group.whole, "fast")[0]}
    graph, names = passed(made.captured)
    assert select.use_kernels(graph, names, kernels) == dict.fromkeys(kernels, 1)
    x = image()
    assert_close(Rewritten(made.captured, graph, [], {}).run(x), [eager(model, x)])


def test_a_weight_that_is_an_input_is_no_site() -> None:
    assert assert_keeps(F.conv2d, image(), torch.randn(3, 4, 2, 2)).sites == []
    assert assert_keeps(F.linear, torch.randn(2, 4), torch.randn(3, 4)).sites == []


def test_a_weight_that_calls_change_is_no_site() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.weight.mul_(0.9)
        return F.conv2d(x, m.weight)

    model = net(forward, weight=torch.randn(3, 4, 2, 2))
    assert rewritten(captured_of(model, image())).sites == []


# -------------------------------------------------------------------- activations


@pytest.mark.parametrize("name", ACTIVATIONS[1:])
def test_an_activation_after_a_layer_becomes_part_of_it(name: str) -> None:
    made = assert_keeps(net(lambda m, x: FUNCTIONS[name](m.conv(x))), image())
    assert ends_of(made) == [("", False, name)]
    assert [made.count(n) for n in ("relu", "hardtanh", name)] == [0, 0, 0]


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_activation_in_place_becomes_part_of_a_layer(name: str) -> None:
    made = assert_keeps(net(lambda m, x: IN_PLACE[name](m.conv(x))), image())
    assert ends_of(made) == [("", False, name)]

    def changed(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        IN_PLACE[name](y)
        return y * 2

    assert ends_of(assert_keeps(net(changed), image())) == [("", False, name)]


@pytest.mark.parametrize("name", ACTIVATIONS[1:])
@pytest.mark.parametrize("layer", ["conv", "deep"])
def test_an_activation_before_a_layer_becomes_part_of_it_if_it_is_zero_at_zero(
    layer: str, name: str
) -> None:
    model = net(lambda m, x: getattr(m, layer)(FUNCTIONS[name](x)))
    made = assert_keeps(model, image())
    is_part = FUNCTIONS[name](torch.zeros(1)).item() == 0
    assert (name in BEFORE) == is_part
    assert ends_of(made) == [(name if is_part else "", False, "")]
    assert made.count(name) + made.count("hardtanh") == (0 if is_part else 1)


def test_activations_on_both_sides_become_parts() -> None:
    made = assert_keeps(net(lambda m, x: F.silu(m.conv(F.relu(x)))), image())
    assert ends_of(made) == [("relu", False, "silu")]
    assert made.count("relu") == made.count("silu") == 0


def test_an_activation_between_two_layers_belongs_to_the_first() -> None:
    made = assert_keeps(net(lambda m, x: m.other(F.relu(m.conv(x)))), image())
    assert ends_of(made) == [("", False, "relu"), ALONE]


def test_an_activation_that_several_layers_begin_with_is_dead() -> None:
    """All read what is before it, also if one of them takes what another made."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        return torch.cat([m.other(F.relu(y)), m.deep(F.relu(y)), y], 1)

    made = assert_keeps(net(forward), image())
    assert ends_of(made) == [ALONE, ("relu", False, ""), ("relu", False, "")]
    assert made.count("relu") == 0


def test_an_activation_that_is_used_elsewhere_stays_too() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu(x)
        return m.conv(y), y

    made = assert_keeps(net(forward), image())
    assert ends_of(made) == [("relu", False, "")]
    assert made.count("relu") == 1


OTHER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "hardtanh": F.hardtanh,
    "another clamp": lambda x: F.hardtanh(x, 0.0, 5.0),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "leaky": F.leaky_relu,
    "softplus": F.softplus,
}


@pytest.mark.parametrize("name", OTHER_ACTIVATIONS)
def test_activations_that_kernels_do_not_know_stay(name: str) -> None:
    function = OTHER_ACTIVATIONS[name]
    made = assert_keeps(net(lambda m, x: function(m.conv(function(x)))), image())
    assert ends_of(made) == [ALONE]


def test_a_clamp_from_0_to_6_is_relu6() -> None:
    made = assert_keeps(
        net(lambda m, x: F.hardtanh_(m.conv(F.hardtanh(x, 0, 6)), 0.0, 6.0)), 4 * image()
    )
    assert ends_of(made) == [("relu6", False, "relu6")]


# -------------------------------------------------------------------- sums

SUMS: dict[str, tuple[Callable[..., Any], list[Ends]]] = {
    "add": (lambda m, x: m.conv(x) + x, [("", True, "")]),
    "add, turned": (lambda m, x: x + m.conv(x), [("", True, "")]),
    "add in place": (lambda m, x: m.conv(x).add_(x), [("", True, "")]),
    "add to the other in place": (lambda m, x: (x * 2).add_(m.conv(x)), [ALONE]),
    "add and activation": (lambda m, x: F.relu(m.conv(x) + x), [("", True, "relu")]),
    "all in place": (lambda m, x: m.conv(x).add_(x).relu_(), [("", True, "relu")]),
    "activation and add": (lambda m, x: F.relu(m.conv(x)) + x, [("", False, "relu")]),
    "everything": (lambda m, x: F.relu(m.conv(F.silu(x)) + x), [("silu", True, "relu")]),
    "depthwise": (lambda m, x: F.relu(m.deep(x) + x), [("", True, "relu")]),
    "of the activation before": (
        lambda m, x: _with_activation_added(m, x),
        [("relu", True, "")],
    ),
    "block": (
        lambda m, x: F.relu(m.other(F.relu(m.conv(x))) + x),
        [("", False, "relu"), ("", True, "relu")],
    ),
    "blocks": (
        lambda m, x: _block(m, _block(m, x)),
        [("", False, "relu"), ("", True, "relu")] * 2,
    ),
    "a parallel branch": (lambda m, x: m.conv(x) + x.sin(), [ALONE]),
    "a parallel layer": (lambda m, x: m.conv(x) + m.other(x), [ALONE, ALONE]),
    "a parallel layer in place": (lambda m, x: m.conv(x).add_(m.other(x)), [ALONE, ALONE]),
    "with a factor": (lambda m, x: torch.add(m.conv(x), x, alpha=2), [ALONE]),
    "with a factor in place": (lambda m, x: m.conv(x).add_(x, alpha=-1), [ALONE]),
    "with the other broadcast": (lambda m, x: m.conv(x) + x[:, :, :1], [ALONE]),
    "with itself broadcast": (lambda m, x: m.other(x[:, :, :1]) + x, [ALONE]),
    "with a number": (lambda m, x: F.relu(m.conv(x) + 1), [ALONE]),
    "with itself": (lambda m, x: _with_itself(m, x), [ALONE]),
    "with integers": (lambda m, x: m.conv(x) + x.round().to(torch.int32), [ALONE]),
    "difference": (lambda m, x: m.conv(x) - x, [ALONE]),
    "used twice": (lambda m, x: _used_twice(m, x), [ALONE]),
    "returned before": (lambda m, x: _returned_before(m, x), [ALONE]),
    "sum used twice": (lambda m, x: _sum_used_twice(m, x), [("", True, "")]),
    "sum, then another sum": (lambda m, x: F.relu(m.conv(x) + x + x), [("", True, "")]),
    "of something not dense": (lambda m, x: m.conv(x) + x[:1].expand(2, -1, -1, -1), [ALONE]),
    "of something turned": (
        lambda m, x: m.conv(x.transpose(2, 3)) + x.transpose(2, 3),
        [ALONE],
    ),
}


def _with_activation_added(m: Any, x: Tensor) -> Tensor:
    y = F.relu(x)
    return m.conv(y) + y


def _block(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.other(F.relu(m.conv(x))) + x)


def _with_itself(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return F.relu(y + y)


def _used_twice(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return F.relu(y) * (y + x)


def _returned_before(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.conv(x)
    return y, F.relu(y + x)


def _sum_used_twice(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x) + x
    return F.relu(y) * y


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_becomes_part_of_a_layer_if_the_layer_waits_for_the_other_anyway(name: str) -> None:
    function, ends = SUMS[name]
    made = assert_keeps(net(function), image())
    if name != "of something turned":  # one value or two, as merging has it
        assert ends_of(made) == ends


def test_a_sum_of_another_dtype_is_no_part() -> None:
    """Under autocast the layer is in bfloat16, and what is added may be in float32."""
    model, x = net(lambda m, x: m.conv(x) + x), image()
    captured = captured_of(model, x, autocast=AutocastState("cpu", torch.bfloat16))
    made = rewritten(captured)
    assert [(site.dtype, site.adds) for site in made.sites] == [("bfloat16", False)]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = eager(model, x)
    assert wanted.dtype == torch.float32
    assert_close(made.run(x), [wanted], 1e-2)


# -------------------------------------------------------------------- linear layers

LINEAR: dict[str, tuple[Callable[..., Any], list[Ends]]] = {
    "alone": (lambda m, x: m.linear(x), [ALONE]),
    "no bias": (lambda m, x: F.linear(x, m.linear.weight), [ALONE]),
    "of a turned weight": (lambda m, x: F.linear(x, m.linear.weight.t(), m.linear.bias), [ALONE]),
    "activation": (lambda m, x: F.gelu(m.linear(x)), [("", False, "gelu")]),
    "activation before": (lambda m, x: m.linear(F.silu(x)), [("silu", False, "")]),
    "residual": (lambda m, x: m.linear(x) + x, [("", True, "")]),
    "residual in place": (lambda m, x: F.silu(m.linear(x).add_(x), True), [("", True, "silu")]),
    "perceptron": (
        lambda m, x: x + m.linear(F.gelu(m.linear(x))),
        [("", False, "gelu"), ("", True, "")],
    ),
    "sum with a row": (lambda m, x: m.linear(x) + x[:1], [ALONE]),
    "reshaped after": (lambda m, x: m.linear(x).flatten().relu(), [ALONE]),
}


@pytest.mark.parametrize("shape", [(3, 6), (2, 5, 6), (2, 1, 3, 6), (1, 6)], ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_of_few_rows_are_sites(name: str, shape: tuple[int, ...]) -> None:
    function, ends = LINEAR[name]
    made = assert_keeps(net(function), torch.randn(shape))
    if name == "sum with a row" and shape[0] == 1:
        return  # the row is all there is
    assert ends_of(made) == ends
    assert {(site.kind, site.image, site.made) for site in made.sites} == {
        ("linear", (math.prod(shape[:-1]), 6, 1, 1), 6)
    }
    assert made.count("linear") == 0


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Ends]] = {
    "as in GPT-2": (lambda m, x: torch.addmm(m.b, x.view(-1, 6), m.w).view(2, 5, 4), (2, 5, 6), ALONE),
    "without a bias": (lambda m, x: torch.mm(x, m.w), (5, 6), ALONE),
    "of a batch": (lambda m, x: x @ m.w, (2, 5, 6), ALONE),
    "of one row": (lambda m, x: F.relu(torch.addmm(m.b, x, m.w)), (1, 6), ("", False, "relu")),
    "activation before": (lambda m, x: F.silu(x) @ m.w, (5, 6), ("silu", False, "")),
    "of a turned matrix": (lambda m, x: torch.addmm(m.b * 2, x, m.turned.t()), (5, 6), ALONE),
    "residual": (lambda m, x: x[:, :4] + torch.addmm(m.b, x, m.w), (5, 6), ALONE),
    "with itself": (lambda m, x: torch.addmm(m.c, y := x @ m.square, m.square) + y, (5, 6), ALONE),
}


def products(function: Callable[..., Any]) -> Model:
    sizes = {"w": (6, 4), "b": (4,), "turned": (4, 6), "square": (6, 6), "c": (6,)}
    return net(function, **{name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()})


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_constant_matrices_are_sites(name: str) -> None:
    function, shape, ends = PRODUCTS[name]
    made = assert_keeps(products(function), torch.randn(shape))
    assert {site.kind for site in made.sites} == {"product"}
    assert made.sites[0].image == (math.prod(shape[:-1]), 6, 1, 1)
    assert made.count("mm") == made.count("addmm") == made.count("matmul") == 0
    if name == "with itself":
        assert ends_of(made) == [ALONE, ("", True, "")]
    else:
        assert ends_of(made) == [ends]


OTHER_PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "factors": (lambda m, x: torch.addmm(m.b, x, m.w, beta=2, alpha=3), (5, 6)),
    "a matrix is added": (lambda m, x: torch.addmm(x[:, :4], x, m.w), (5, 6)),
    "a number is added": (lambda m, x: torch.addmm(m.b[:1], x, m.w), (5, 6)),
    "a matrix of its own": (lambda m, x: x @ x.t(), (5, 6)),
    "a vector": (lambda m, x: x @ m.c, (5, 6)),
    "matrices": (lambda m, x: x @ m.w.expand(2, 6, 4), (2, 5, 6)),
    "the constant first": (lambda m, x: m.w.t() @ x, (6, 5)),
}


@pytest.mark.parametrize("name", OTHER_PRODUCTS)
def test_other_products_are_not(name: str) -> None:
    function, shape = OTHER_PRODUCTS[name]
    assert assert_keeps(products(function), torch.randn(shape)).sites == []


def test_as_many_rows_as_are_few_are_a_site() -> None:
    assert len(assert_keeps(nn.Linear(4, 3), torch.randn(512, 4)).sites) == 1
    assert len(assert_keeps(nn.Linear(4, 3), torch.randn(513, 4)).sites) == 0


def test_rows_that_lie_apart_are_taken() -> None:
    model = net(lambda m, x: m.linear(x.transpose(1, 2)) + x.transpose(1, 2))
    made = assert_keeps(model, torch.randn(2, 6, 5))
    assert [site.kind for site in made.sites] == ["linear"]


def test_linear_layers_have_kernels_in_any_layout() -> None:
    model = net(lambda m, x: x + m.linear(F.gelu(m.linear(x))))
    x = torch.randn(3, 6)
    made = rewritten(captured_of(model, x), "as captured")
    assert len(made.ours) == 2
    assert_close(made.run(x), [eager(model, x)])


# -------------------------------------------------------------------- values that are written


def _added_to_after(m: Any, x: Tensor) -> Tensor:
    """What is added is not what the convolution saw."""
    y = x * 2
    z = m.conv(y)
    y.add_(1)
    return z + y


def _image_written_after(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = m.conv(y)
    return z.relu_(), y.mul_(3)


def _source_written_between(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = F.relu(y)
    y.sub_(1)
    return m.conv(z) * y


def _source_written_before(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.sub_(1)
    return m.conv(F.relu(y))


def _source_written_after(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = m.conv(F.relu(y))
    y.sub_(1)
    return z * y


def _activated_in_place_before(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.relu_()
    return m.conv(y) + y


def _chain_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.relu_()
    y.add_(1)
    y = m.other(y)
    y.add_(x)
    y.relu_()
    return y


def _result_written_between(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.add_(1)
    return F.relu(y + x)


def _sum_written_between(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x) + x
    y.mul_(2)
    return y.relu_()


def _activation_written(m: Any, x: Tensor) -> Tensor:
    y = F.relu(x)
    y.sub_(1)
    return m.conv(y)


def _filled(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    z = F.relu(y)
    torch.sin(x, out=y)
    return m.conv(z) + m.other(y)


def _views_of_what_is_written(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    top = y[:, :, :3]
    z = F.relu(top)
    y.sub_(1)
    return m.conv(z)


def _view_is_added(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    turned = y.transpose(2, 3)
    z = m.conv(turned)
    y.sub_(1)
    return z + turned


def _written_by_the_sum(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    part = y[:, :1]
    y.add_(m.conv(y))
    return y * 2, part + 1


WRITTEN: dict[str, tuple[Callable[..., Any], list[Ends]]] = {
    "what is added, between": (_added_to_after, [ALONE]),
    "the image, afterwards": (_image_written_after, [("", False, "relu")]),
    "what is activated, between": (_source_written_between, [ALONE]),
    "what is activated, before": (_source_written_before, [("relu", False, "")]),
    "what is activated, afterwards": (_source_written_after, [("relu", False, "")]),
    "the image, by its activation": (_activated_in_place_before, [("", True, "")]),
    "a chain": (_chain_in_place, [("", False, "relu"), ("", True, "relu")]),
    "the result, between": (_result_written_between, [ALONE]),
    "the sum, between": (_sum_written_between, [("", True, "")]),
    "the activation": (_activation_written, [ALONE]),
    "by an argument named out": (_filled, []),  # which might be a view
    "what is activated, through its base": (_views_of_what_is_written, [ALONE]),
    "what is added, through its base": (_view_is_added, [ALONE]),
    "what is added, by the sum": (_written_by_the_sum, [ALONE]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_values_are_those_at_the_time_they_were_read(name: str) -> None:
    function, ends = WRITTEN[name]
    made = assert_keeps(net(function), image())
    assert ends_of(made) == ends


def _activation_written_by_a_view(m: Any, x: Tensor) -> Tensor:
    y = F.relu(x)
    y.view(-1).sub_(1)
    return m.conv(y)


def _activation_written_in_part(m: Any, x: Tensor) -> Tensor:
    y = F.relu(x)
    y[:, 0] = 3
    return m.conv(y)


def _source_written_by_a_view(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = F.relu(y)
    y[:, 0].sub_(1)
    return m.conv(z)


def _source_written_by_a_piece(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = F.relu(y)
    first, _ = y.chunk(2, 1)
    first.sub_(1)
    return m.conv(z)


def _source_is_a_piece(m: Any, x: Tensor) -> Tensor:
    y = torch.cat([x, x], 1) * 2
    first, _ = y.chunk(2, 1)
    z = F.relu(first)
    y.sub_(1)
    return m.conv(z)


def _added_written_by_a_piece(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = m.conv(y)
    y.unbind(1)[0].sub_(1)
    return z + y


def _source_written_by_another_name(m: Any, x: Tensor) -> Tensor:
    """Nothing tells that this gives its argument back."""
    y = x * 2
    z = F.relu(y)
    F.dropout2d(y, 0.5, training=False).sub_(1)
    return m.conv(z)


def _result_written_by_a_view(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.flatten(1).add_(1)
    return y


def _result_written_in_part(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, 0] = 3
    return y


def _result_viewed_beside_a_write(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    z = x * 2
    z[0].add_(1)
    return m.conv(x).view(-1), z


WRITTEN_BY_VIEWS: dict[str, Callable[..., Any]] = {
    "the activation, by a view": _activation_written_by_a_view,
    "the activation, in part": _activation_written_in_part,
    "what is activated, by a view": _source_written_by_a_view,
    "what is activated, by a piece": _source_written_by_a_piece,
    "what is activated, a piece of it": _source_is_a_piece,
    "what is activated, by another name": _source_written_by_another_name,
    "what is added, by a piece": _added_written_by_a_piece,
    "the result, by a view": _result_written_by_a_view,
    "the result, in part": _result_written_in_part,
    "another value, by a view": _result_viewed_beside_a_write,
}


@pytest.mark.parametrize("name", WRITTEN_BY_VIEWS)
def test_writes_through_views_are_seen(name: str) -> None:
    assert_keeps(net(WRITTEN_BY_VIEWS[name]), image())


# -------------------------------------------------------------------- random programs

_Step = tuple[str, int, int]


def _program(steps: list[_Step]) -> Callable[[Any, Tensor], Tensor]:
    """Each step takes one or two of the values that are there, and makes another or changes one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        values = [x.sin(), x.cos()]
        for name, i, j in steps:
            first, second = values[-1 - i % len(values)], values[-1 - j % len(values)]
            match name:
                case "conv" | "other" | "deep":
                    values.append(getattr(m, name)(first))
                case "relu" | "silu":
                    values.append(FUNCTIONS[name](first))
                case "add":
                    values.append(first + second)
                case "branch":
                    values.append(m.conv(F.relu(first)) + second)
                case "relu_":
                    first.relu_()
                case "add_":
                    first.add_(second)
                case "shift_":
                    first.sub_(0.25)
                case "view":
                    first.flatten(1).sub_(0.25)
                case "part":
                    first[:, 1:3].mul_(-1)
                case "piece":
                    first.chunk(2, 1)[1].add_(0.5)
        return values[-1]

    return forward


def _steps(*names: str) -> st.SearchStrategy[list[_Step]]:
    """Mostly on the value that was made last, and one that was made shortly before."""
    numbers = st.sampled_from((0, 0, 0, 0, 1, 2)), st.sampled_from((1, 1, 1, 0, 2, 3))
    return st.lists(st.tuples(st.sampled_from(names), *numbers), min_size=4, max_size=12)


CONVOLVING = ("conv", "conv", "deep", "other", "branch")
PLAIN = (*CONVOLVING, "relu", "relu", "silu", "add", "add", "relu_", "relu_", "add_", "add_", "shift_")
VIEWS = ("view", "part", "piece")
REPEATABLE = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def _assert_programs_keep(*names: str) -> Counter[str]:
    """Programs of such steps give what eager gives; how often what was part of a site."""
    model, x = net(lambda m, x: x), torch.randn(1, 4, 3, 4)
    seen: Counter[str] = Counter()

    @REPEATABLE
    @given(_steps(*names))
    def check(steps: list[_Step]) -> None:
        torch.manual_seed(0)
        model._function = _program(steps)
        made = assert_keeps(model, x, may_vanish=True)
        for site in made.sites:
            seen.update({"sites": 1, "before": bool(site.before), "sum": site.adds})
            seen.update({"after": bool(site.after), "sum and after": bool(site.adds and site.after)})

    check()
    return seen


def test_random_programs_with_writes_give_what_eager_gives() -> None:
    seen = _assert_programs_keep(*PLAIN)
    assert min(seen[name] for name in ("before", "sum", "after", "sum and after")) > 2, seen


def test_random_programs_with_writes_through_views_give_what_eager_gives() -> None:
    seen = _assert_programs_keep(*PLAIN, *VIEWS)
    assert seen["sites"] > 20, seen


# -------------------------------------------------------------------- what is chosen


def test_only_what_was_chosen_is_replaced_and_counted() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 1),
    )
    x = image()
    captured = captured_of(model, x)
    twice, activated, point = (
        Site((2, 4, 5, 5), 4, Window((3, 3), padding=(1, 1)), "float32", has_bias=True),
        Site((2, 4, 5, 5), 4, Window((3, 3), padding=(1, 1)), "float32", after="relu", has_bias=True),
        Site((2, 4, 5, 5), 4, Window((1, 1)), "float32", has_bias=True),
    )
    assert find_sites(captured) == {twice: 2, activated: 1, point: 1}
    config = configs(twice, "fast")[1]
    for chosen, counts in (
        ({}, {}),
        ({str(twice): LIBRARY}, {}),
        ({str(twice): config, str(activated): LIBRARY}, {str(twice): 2}),
        (
            {str(twice): config, str(point): config, "another": config},
            {str(twice): 2, str(point): 1},
        ),
    ):
        graph, names = passed(captured)
        assert select.use_kernels(graph, names, chosen) == counts
        made = Rewritten(captured, graph, [], counts)
        assert [node.args[-1] for node in made.ours] == [config] * sum(counts.values())
        assert made.count("conv2d") == 4 - len(made.ours)
        assert_close(made.run(x), [eager(model, x)])


def _residual_chain(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.other(m.deep(x)) + x)
    return m.other(F.silu(m.deep(F.gelu(y)))) + y


def test_any_of_what_is_found_may_be_chosen() -> None:
    """Two blocks, the second of which reads and adds what the first makes; all sets of choices."""
    model, x = net(_residual_chain), image()
    captured = captured_of(model, x)
    sites = find_sites(captured)
    assert list(sites.values()) == [1, 1, 1, 1]
    wanted = [eager(model, x)]
    for count in range(len(sites) + 1):
        for some in itertools.combinations(sites, count):
            graph, names = passed(captured)
            chosen = {str(site): configs(site, "fast")[-1] for site in some}
            counts = select.use_kernels(graph, names, chosen)
            graph.lint()
            made = Rewritten(captured, graph, [], counts)
            assert counts == dict.fromkeys(chosen, 1)
            assert sorted(node.args[-1] for node in made.ours) == sorted(chosen.values())
            assert_close(made.run(x), wanted)


def test_looking_for_sites_changes_nothing() -> None:
    captured = captured_of(net(_block), image())
    before = str(captured.graph)
    assert sum(find_sites(captured).values()) == 2
    assert str(captured.graph) == before
    graph, names = passed(captured)
    before = str(graph)
    layers_pass.find_sites(graph, names)
    assert str(graph) == before


def test_our_operator_says_the_shape_and_strides_of_its_result() -> None:
    x = image()
    made = rewritten(captured_of(net(_block), x))
    split = split_constants(made.captured, made.graph)
    left = [node.target for node in split.graph.nodes if node.op == "call_function"]
    assert lay_out not in left  # done ahead of time
    fakes, _ = observe(made.captured, list(made.graph.nodes), copy=False)
    (result,) = made.run(x)
    (node,) = made.graph.output_node().all_input_nodes
    assert node in made.ours
    fake = fakes[node]
    assert (fake.shape, fake.stride(), fake.dtype) == (result.shape, result.stride(), result.dtype)


# -------------------------------------------------------------------- rounded weights


def nearest_tf32(number: float) -> float:
    """The nearest number with ten bits after the first, the even one of two; by fractions."""
    if number == 0 or not math.isfinite(number):
        return number
    exponent = max(math.frexp(number)[1] - 1, -126)
    step = Fraction(2) ** (exponent - 10)
    rounded = round(Fraction(number) / step) * step
    return math.copysign(float(rounded), number)


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1 + 2**-11,  # ties
    1 + 3 * 2**-11,
    -(1 + 2**-11),
    1 + 2**-11 + 2**-23,
    2 - 2**-23,  # the next power
    1e-40,
    -3e-45,
    float(torch.finfo(torch.float32).max),
    math.inf,
    -math.inf,
]


def test_numbers_are_rounded_to_the_nearest_of_tf32() -> None:
    scales = torch.logspace(-44, 38, 2000, dtype=torch.float64)
    many = (torch.randn(2000).double() * scales).float()
    given_ = torch.cat([torch.tensor(SPECIAL), many[many.isfinite()]])
    wanted = torch.tensor([nearest_tf32(x) for x in given_.tolist()], dtype=torch.float64).float()
    found = lay_out(given_[None, :, None, None], "dense", to_tf32=True).flatten()
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    # Any bits at all may follow the exponent of what is no number.
    nans = torch.tensor([[0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF]], dtype=torch.int32)
    assert lay_out(nans.view(torch.float32)[:, :, None], "dense", to_tf32=True).isnan().all()
    assert torch.equal(lay_out(given_[None, :, None, None], "dense").flatten(), given_)


def test_weights_of_linear_layers_are_not_kept_twice() -> None:
    weight = torch.randn(6, 8)
    for kind in OF_ROWS:
        assert lay_out(weight, kind, to_tf32=True).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(("convolutions", "products"), [(True, False), (False, True)])
def test_products_may_be_rounded_where_torchs_flag_for_them_says_so(
    convolutions: bool, products: bool
) -> None:
    let_round(convolutions, products)
    assert may_round("dense") == convolutions
    assert may_round("linear") == may_round("product") == products


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("layer", ["conv", "linear", "deep"])
def test_weights_are_rounded_for_configs_that_round_and_for_no_others(layer: str, is_on: bool) -> None:
    """Whatever torch's flags are by then: a plan has to give the same bits again."""
    let_round(convolutions=is_on, products=is_on)
    model = net(lambda m, x: getattr(m, layer)(x))
    x = torch.randn(7, 6) if layer == "linear" else image()
    weight = getattr(model, layer).weight.detach()
    captured = captured_of(model, x)
    (site,) = find_sites(captured)
    for config in (*configs(site, "full", True), *configs(site, "full", False)):
        graph, names = passed(captured)
        assert select.use_kernels(graph, names, {str(site): config}) == {str(site): 1}
        made = Rewritten(captured, graph, [site], {})
        (node,) = made.ours
        assert isinstance(node.args[1], fx.Node)
        assert node.args[1].target is lay_out
        found = lay_out(weight, *node.args[1].args[1:])  # type: ignore[arg-type]
        plain = lay_out(weight, site.kind)
        # Those of linear layers are rounded in the kernel: they are read as they are.
        rounds = Way.parse(config).precision == "tf32" and layer != "linear"
        assert torch.equal(found, plain) != rounds
        wanted = [nearest_tf32(w) for w in plain.flatten().tolist()]
        assert not rounds or found.flatten().tolist() == wanted
        assert_close(made.run(x), [eager(model, x)], 2e-3 if rounds else None)


# -------------------------------------------------------------------- dropout

DROPOUT: dict[str, tuple[Callable[..., Any], int]] = {  # and how many are left
    "in eval mode": (lambda m, x: F.relu(F.dropout(m.conv(x), 0.5, m.training)), 0),
    "in place": (lambda m, x: F.dropout(m.conv(x), 0.5, m.training, inplace=True).relu_(), 0),
    "several": (lambda m, x: F.dropout(F.dropout(x + 1, 0.1, False), 0.2, False, True), 0),
    "written afterwards": (lambda m, x: _dropped_and_written(m, x), 0),
    "of an input": (lambda m, x: F.dropout(x, 0.5, False), 1),
    "of an input, used": (lambda m, x: m.conv(F.dropout(x, 0.5, False)), 0),
}


def _dropped_and_written(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Without dropping anything, both are one tensor."""
    y = m.conv(x)
    z = F.dropout(y, 0.5, False)
    z.add_(1)
    return y, z * 2


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_that_drops_nothing_disappears_unless_it_makes_a_result_of_an_input(name: str) -> None:
    function, count = DROPOUT[name]
    model, x = net(function), image()
    captured = captured_of(model, x)
    captured.graph.lint()
    assert sum("dropout" in str(node.target) for node in captured.graph.nodes) == count
    assert_close(Rewritten(captured, captured.graph, [], {}).run(x), as_list(eager(model, x)))
    assert_keeps(model, x)


def test_dropout_is_no_obstacle_to_an_activation_or_a_sum() -> None:
    made = assert_keeps(
        net(lambda m, x: F.relu(F.dropout(m.conv(x), 0.5, m.training, inplace=True) + x)), image()
    )
    assert ends_of(made) == [("", True, "relu")]


@pytest.mark.parametrize("in_place", [True, False])
def test_dropout_that_draws_stays(in_place: bool) -> None:
    model = net(lambda m, x: F.dropout(m.conv(x), 0.5, True, in_place))
    captured = captured_of(model, image())
    made = rewritten(captured)
    assert made.count("dropout") + made.count("dropout_") == 1
    (result,) = made.run(image())
    assert 0.2 < (result == 0).float().mean() < 0.8
