"""Convolutions and linear layers as kernels see them, and the ways in which kernels can cut the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from torch_nimble.errors import PlanError

Kind = Literal["dense", "depthwise", "linear", "product", "attention"]
"""Every channel of the result from all of the image's; each from one; a linear layer, whose rows are
images of one pixel; such a layer whose weight is a matrix to multiply with as it lies; and attention,
which has sites of its own (see heads)."""
OF_IMAGES: tuple[Kind, ...] = ("dense", "depthwise")
"""Kinds that read images."""
OF_ROWS: tuple[Kind, ...] = ("linear", "product")
"""Kinds of which the image is rows."""
Effort = Literal["off", "fast", "full"]
EFFORTS: tuple[str, ...] = get_args(Effort)

LIBRARY = "library"
"""The choice to leave a convolution to torch."""
APART = "apart"
"""The choice to carry several layers out one by one, each as is best for it."""
MERGED = "merged"
"""The choice to make one layer of several that read the same image."""

ACTIVATIONS = ("", "relu", "relu6", "silu", "hardswish", "gelu", "sigmoid")
"""Those that kernels know."""
BEFORE = ACTIVATIONS[:-1]
"""Those that may come before a convolution: they are zero at zero, as the padding of images is."""

DTYPES = ("float16", "bfloat16", "float32")
_NUMBERS = {
    "depthwise": 3,
    "vector": 3,
    "rows": 3,
    "convolution": 6,
    "gathered": 6,
    "linear": 6,
    "product": 6,
    "attention": 4,
}
"""How many there are in a config of each family."""
_PRECISIONS = ("", "tf32", "tf32x3", "ieee")
_BY_MATRIX_UNIT = ("convolution", "gathered", "linear", "product")
_OF_ROWS = (*OF_ROWS, "rows")
"""Families for layers of rows."""
_FAST, _FAST_OF_ROWS = 2, 3
"""How many configs are tried in a hurry: where it is known well which of them win, fewer."""
MOST_NUMBERS = 2**31
"""Kernels count in 32 bits."""
_FEW_PIXELS = 4
_ENOUGH_TILES = 64
"""So many occupy half of the processors of a large GPU, and each reads the less the larger it is."""
_MANY_TILES = 1024
"""With more the processors of a large GPU have several rounds of work, and larger ones pay."""
_SMALLEST_SUM = 16
"""What a matrix unit sums at least at a time."""


@dataclass(frozen=True)
class Window:
    """What a convolution looks at, rows before columns."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the result."""
        rows, columns = (
            (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, stride, pad, dilation in zip(
                (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return rows, columns

    def numbers(self) -> tuple[int, ...]:
        """In the order in which `from_numbers` and kernels take them."""
        return (*self.kernel, *self.stride, *self.padding, *self.dilation)

    @classmethod
    def from_numbers(cls, numbers: tuple[int, ...]) -> Window:
        """The window of `numbers()`."""
        a, b, c, d, e, f, g, h = numbers
        return cls((a, b), (c, d), (e, f), (g, h))

    @property
    def is_point(self) -> bool:
        """Whether each pixel of the result comes from the one at its place."""
        return self.numbers() == (1, 1, 1, 1, 0, 0, 1, 1)


@dataclass(frozen=True)
class Site:
    """A layer with what surrounds it, as far as its time depends on that."""

    image: tuple[int, int, int, int]
    """Images, channels, rows, columns."""
    made: int
    """Channels of the result."""
    window: Window
    dtype: str
    kind: Kind = "dense"
    before: str = ""
    after: str = ""
    has_bias: bool = False
    adds: bool = False
    """Whether another tensor is added to the result, before the activation."""
    is_scaled: bool = False
    """Whether channels are multiplied by numbers of their own before their bias is added."""

    def __str__(self) -> str:
        """A name for people and files; equal for equal sites only."""
        window = self.window
        image = self.image[:2] if self.kind in OF_ROWS else self.image
        words = [
            "×".join(map(str, image)),
            self.dtype,
            "depthwise" if self.kind == "depthwise" else f"to {self.made}",
            self.kind if self.kind in OF_ROWS else "×".join(map(str, window.kernel)),
        ]
        usual = Window(window.kernel)
        words += [
            f"{name} {'×'.join(map(str, getattr(window, name)))}"
            for name in ("stride", "padding", "dilation")
            if getattr(window, name) != getattr(usual, name)
        ]
        words += [f"{self.before} before"] if self.before else []
        ends = ("scaled" * self.is_scaled, "bias" * self.has_bias, "sum" * self.adds, self.after)
        words += [name for name in ends if name]
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Site:
        """The site of that name."""
        shape, dtype, *words = text.split()
        sizes = [int(number) for number in shape.split("×")]
        kind: Kind = "depthwise" if words[0] == "depthwise" else "dense"
        made = sizes[1] if kind == "depthwise" else int(words[1])
        form, *words = words[1 if kind == "depthwise" else 2 :]
        for one in OF_ROWS:
            if form == one:
                kind, form = one, "1×1"
        geometry = {"kernel": _pair(form)}
        while words and words[0] in ("stride", "padding", "dilation"):
            geometry[words[0]] = _pair(words[1])
            words = words[2:]
        before = words[0] if words[1:2] == ["before"] else ""
        ends = words[2:] if before else words
        after = [word for word in ends if word not in ("scaled", "bias", "sum")]
        images, channels, height, width = (*sizes, 1, 1)[:4]
        return cls(
            (images, channels, height, width),
            made,
            Window(**geometry),
            dtype,
            kind,
            before,
            after[0] if after else "",
            "bias" in ends,
            "sum" in ends,
            "scaled" in ends,
        )


@dataclass(frozen=True)
class Siblings:
    """Layers that read the same image and could be one."""

    sites: tuple[Site, ...]
    readers: tuple[Site, ...] = ()
    """Those that read what one of them makes, and would read a part of what all make."""

    @property
    def whole(self) -> Site:
        """One layer that makes the channels of all of them."""
        return replace(self.sites[0], made=sum(site.made for site in self.sites))

    def __str__(self) -> str:
        """Such as `1×192×28×28 float16 to 64+96+16 1×1 bias relu`."""
        whole, each = self.whole, "+".join(str(site.made) for site in self.sites)
        return str(whole).replace(f" to {whole.made} ", f" to {each} ", 1)


def _pair(text: str) -> tuple[int, int]:
    first, second = map(int, text.split("×"))
    return first, second


@dataclass(frozen=True)
class Tuned:
    """What was tried for a site, and what won."""

    site: str
    kind: Kind
    chosen: str
    times_us: Mapping[str, float]
    """Of one call of each that was right, the library's included."""
    refused: Mapping[str, str]
    """Why the others were not compared."""


class Way(NamedTuple):
    """A config, taken apart."""

    family: str
    precision: str
    """How a matrix unit multiplies float32; nothing for other dtypes and families."""
    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, config: str) -> Way:
        """Such as `convolution-tf32/16/32/64/4/3/1`; PlanError for what is not known."""
        name, *texts = config.split("/")
        family, _, precision = name.partition("-")
        numbers = [int(text) for text in texts if text.isdecimal()]
        is_whole = len(texts) == len(numbers) == _NUMBERS.get(family) and min(numbers) > 0
        if not is_whole or precision not in _PRECISIONS:
            raise PlanError(f"there is no kernel {config!r}; was it chosen by another version?")
        return cls(family, precision, tuple(numbers))


def called(config: str) -> str:
    """What tasks by such a kernel are called: what they do, and the family that does it.

    A linear layer is called a product, whichever operator stands for it in a graph.
    """
    family = Way.parse(config).family
    return f"torch_nimble.{'matmul' if family in _OF_ROWS else 'convolve'}.{family}"


def count_kernels(config: str) -> int:
    """How many kernels a config takes: a sum in parts is added up by a second one."""
    family, *numbers = config.split("/")
    is_in_parts = family.split("-")[0] in _BY_MATRIX_UNIT and numbers[-1] != "1"
    return 2 if is_in_parts else 1


Tuning = tuple[tuple[Tuned, int], ...]
"""What was tried for the layers of a graph, and how many there are of each kind."""


def configs(site: Site, effort: Effort, may_round: bool = False) -> tuple[str, ...]:
    """Ways to cut the work of a site that are worth trying, the likeliest first.

    The order is that of what won on the networks of the zoo in `benchmarks/results`.

    With `may_round`, products of float32 may be those of numbers rounded to TF32. Where a library does
    not do that all the same, three such products give nearly what one of float32 does.
    """
    if effort == "off" or site.dtype not in DTYPES:
        return ()
    ways = _depthwise(site) if site.kind == "depthwise" else _dense(site)
    found = tuple(dict.fromkeys(ways))
    matrices = [config for config in found if Way.parse(config).family in _BY_MATRIX_UNIT]
    others = [config for config in found if config not in matrices]
    hurry = _FAST_OF_ROWS if site.kind in OF_ROWS else _FAST
    count = hurry if effort == "fast" else len(found)
    if site.dtype != "float32" or not matrices:
        return found[:count]
    kept = matrices[: max(0, count - len(others))]
    usual, rare = ("tf32", "tf32x3") if may_round else ("tf32x3", "ieee")
    few = kept[: -(-len(kept) // 3)]
    usually = (with_precision(config, usual) for config in kept)
    rarely = (with_precision(config, rare) for config in few)
    return (*others[:count], *usually, *rarely)


def with_precision(config: str, precision: str) -> str:
    """The same way, with products of float32 of that precision."""
    family, numbers = config.split("/", 1)
    return f"{family}-{precision}/{numbers}"


def _depthwise(site: Site) -> Iterator[str]:
    """Pixels, channels, warps."""
    whole = _power(site.image[1])
    tile = min(64, whole)
    rows, columns = site.window.size(*site.image[2:])
    is_large = rows * columns * site.image[0] > 40 * 40
    first = [(8, tile, 4), (32, min(32, tile), 4) if is_large else (16, tile, 4)]
    rest = [
        (16, tile, 4),
        (4, tile, 2),
        (8, min(32, tile), 1),
        (16, min(32, tile), 2),
        (4, min(128, whole), 4),
        (8, min(128, whole), 8),
        (32, min(32, tile), 4),
        (8, tile, 2),
    ]
    for pixels, channels, warps in (*first, *rest):
        yield f"depthwise/{pixels}/{channels}/{warps}"


def _dense(site: Site) -> Iterator[str]:
    """Pixels, channels made, how many are summed at a time, warps, stages of loads, parts of the sum."""
    rows, columns = site.window.size(*site.image[2:])
    pixels = rows * columns * site.image[0]
    taps = site.window.kernel[0] * site.window.kernel[1]
    if pixels <= _FEW_PIXELS and site.window.is_point:
        most, few = _power(site.image[1]), "rows" if site.kind == "linear" else "vector"
        for numbers in (
            (8, 2048, 8),
            (16, 512, 4),
            (8, 1024, 4),
            (4, 1024, 4),
            (32, 256, 4),
            (16, 1024, 8),
        ):
            yield f"{few}/{numbers[0]}/{min(most, numbers[1])}/{numbers[2]}"
    if site.image[1] < 2 * _SMALLEST_SUM and site.kind not in OF_ROWS:
        summed = min(64, max(_SMALLEST_SUM, _power(taps * site.image[1])))
        made = min(64, max(16, _power(site.made)))
        for numbers in ((32, made, 4), (64, made, 4), (128, made, 4), (128, made, 8), (64, 16, 4)):
            yield "gathered/" + "/".join(map(str, (*numbers[:2], summed, numbers[2], 3, 1)))
        if site.image[1] < _SMALLEST_SUM:
            return
    summed = 128 if site.image[1] >= 256 else 64 if site.image[1] > 32 else 32
    stages = 4 if taps * site.image[1] > 4 * summed else 3
    is_wide = site.made >= 192
    wide, at_most_64 = 64 if is_wide else 32, min(64, summed)
    is_few = pixels <= 28 * 28
    if is_few and site.kind in OF_ROWS and _tiles(pixels, site.made, 64) >= _ENOUGH_TILES:
        first = [(64, 64, 64), (32, 32, summed), (16, 64, summed)]
    elif is_few and taps > 1 and 64 < site.image[1] <= 128:
        first = [(16, 32, 128), (16, 32, summed), (32, 32, summed)]
    elif pixels <= 14 * 14:
        first = [(16, 32, summed), (16, 64 if is_wide else 16, summed), (32, 32, summed)]
    elif is_few:
        first = [(16, 32, summed), (64 if is_wide else 32, 32, summed), (32, wide, summed)]
    elif _tiles(pixels, site.made, wide) > _MANY_TILES:
        first = [(64, wide, at_most_64), (128, 64, 32), (64, 32, at_most_64)]
    else:
        less = (64, 32, at_most_64) if is_wide else (32, 32, summed)
        first = [(64, wide, at_most_64), less, (32, 32, summed)]
    rest = [
        (16, 16, summed),
        (16, 64, 64),
        (32, 64, 64),
        (64, 64, 64),
        (32, 32, 64),
        (64, 64, 32),
        (128, 64, 32),
        (16, 32, 256),
    ]
    family = site.kind if site.kind in OF_ROWS else "convolution"
    whole = [(*numbers, 1) for numbers in (*first, *rest)]
    cuts = [
        parts
        for parts in (8, 4)
        if taps * site.image[1] >= 256 * parts and is_few and parts * pixels * site.made < MOST_NUMBERS
    ]
    cut = [
        (*numbers, parts) for numbers in ((64, 64, 64), (32, 64, 64), (16, 64, 128)) for parts in cuts
    ]
    tries_whole = pixels <= 14 * 14 and len(cuts) < 2
    ordered = [*cut[:1], *whole[:tries_whole], *cut[1:2], *whole[tries_whole:], *cut[2:]]
    for a, b, c, parts in ordered:
        c = min(c, max(_SMALLEST_SUM, _power(site.image[1])))
        steps = taps * -(-site.image[1] // c)
        if -(-steps // -(-steps // parts)) < parts:  # the last would have nothing to do
            continue
        yield f"{family}/{a}/{b}/{c}/{8 if a * b >= 128 * 64 else 4}/{stages}/{parts}"


def _tiles(pixels: int, made: int, wide: int) -> int:
    return -(-pixels // 64) * -(-made // wide)


def _power(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()
