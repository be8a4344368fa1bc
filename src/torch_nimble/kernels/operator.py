"""The operator that stands for our kernels in a graph: `torch_nimble::convolve`.

Which kernel carries it out is an argument, chosen ahead of time. Its weight is laid out by `lay_out`,
its result is channels-last, its image is so or some channels of one that is (`pitch_of`). A bias of two
rows of float32 has factors for the channels of the result in the first.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torch_nimble.errors import first_line
from torch_nimble.flags import convolutions_may_use_tf32, matmul_may_use_tf32
from torch_nimble.kernels.heads import Attention
from torch_nimble.kernels.sites import MOST_NUMBERS, OF_IMAGES, Kind, Site, Way, Window

if TYPE_CHECKING:
    from torch_nimble.kernels.parts import Launch

Tensor = torch.Tensor
_SCHEMA = (
    "convolve(Tensor x, Tensor weight, Tensor? bias, Tensor? added, int[8] window, "
    "str before, str after, str config) -> Tensor"
)
_LINEAR = ("linear", "rows")
"""Families that read a weight as linear layers have it."""
_EARLY_FROM = 90
"""The first compute capability at which kernels can wait for others by themselves."""
_PDL = {"launch_pdl": True}
"""Triton's name for that, programmatic dependent launch."""
library = torch.library.Library("torch_nimble", "DEF")  # type: ignore[no-untyped-call]
"""All operators of ours."""
library.define(_SCHEMA, tags=(torch.Tag.needs_exact_strides,))  # type: ignore[no-untyped-call]


def lay_out(weight: Tensor, kind: Kind, to_tf32: bool = False) -> Tensor:
    """A weight as kernels want it: window by channels, or window and channels by channels made.

    What rows are multiplied with stays as it is: it may be large, and a copy would have to be kept, too.
    """
    if kind == "product":
        return weight.contiguous()
    made, channels = weight.shape[:2]
    if kind == "linear":
        return weight.reshape(made, channels).contiguous()
    if kind == "depthwise":
        return weight.reshape(made, -1).t().contiguous()
    places = weight.reshape(made, channels, -1).permute(2, 1, 0)
    laid_out = places.reshape(-1, made).contiguous()
    return _rounded_to_tf32(laid_out) if to_tf32 else laid_out


def may_round(kind: Kind) -> bool:
    """Whether torch's flags let products of float32 in such a layer be those of rounded numbers."""
    return convolutions_may_use_tf32() if kind in OF_IMAGES else matmul_may_use_tf32()


def _rounded_to_tf32(tensor: Tensor) -> Tensor:
    """To the nearest number of ten bits after the first."""
    bits = tensor.view(torch.int32)
    nearest = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(tensor), nearest, tensor)


def site_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Tensor | None,
    window: Sequence[int],
    before: str,
    after: str,
    config: str,
) -> Site:
    """What the operator is asked to compute."""
    images, channels, height, width = x.shape
    family = Way.parse(config).family
    kind: Kind = "depthwise" if family == "depthwise" else "linear" if family in _LINEAR else "dense"
    return Site(
        image=(images, channels, height, width),
        made=weight.shape[0 if kind == "linear" else 1],
        window=Window.from_numbers(tuple(window)),
        dtype=str(x.dtype).removeprefix("torch."),
        kind=kind,
        before=before,
        after=after,
        has_bias=bias is not None,
        adds=added is not None,
        is_scaled=bias is not None and bias.dim() == 2 and bias.dtype == torch.float32,
    )


def launches_of(
    site: Site, config: str, capability: int, pitch: int | None = None
) -> tuple[Launch, ...]:
    """What carries a site out in the way of a config, on a device of that compute capability.

    Pixels of the image may lie further apart than by their channels, by `pitch`.
    """
    from torch_nimble.kernels import convolution, depthwise, vector

    way = Way.parse(config)
    families = {"depthwise": depthwise, "vector": vector, "rows": vector}
    family = families.get(way.family, convolution)
    launches: tuple[Launch, ...] = family.launches(site, way)
    where = {"PITCH": site.image[1] if pitch is None else pitch}
    return tuple(
        early(launch, capability, **(where if launch.reads_image else {})) for launch in launches
    )


def early(launch: Launch, capability: int, **more: Any) -> Launch:
    """The same for a device of that compute capability, with more constants.

    From Hopper on, a kernel is launched while the one before it still runs, and waits for its end.
    """
    is_early = capability >= _EARLY_FROM
    more |= {"EARLY": is_early, **(_PDL if is_early and launch.early else {})}
    return replace(launch, constants={**launch.constants, **more})


def launched(launch: Launch, what: str, *arguments: Any) -> None:
    """Launch a kernel; RuntimeError that says what it was if that cannot be done."""
    try:
        launch.kernel[launch.grid](*arguments, **launch.constants)
    except Exception as reason:  # Triton's own errors have no base that is torch's, too
        raise RuntimeError(
            f"the kernel {what} cannot be launched: {type(reason).__name__}: {first_line(reason)}"
        ) from reason


@functools.cache
def capability_of(device: torch.device) -> int:
    """Such as 90; zero for what is no GPU."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


def pitch_of(x: Tensor) -> int | None:
    """How far apart the pixels of an image lie; None if not all as far as their neighbours.

    None as well if that would be further than kernels can count.
    """
    _, channels, height, width = x.shape
    sizes = (width, height, x.shape[0])
    steps = (x.stride(3), x.stride(2), x.stride(0))
    pitch, pixels = None, 1
    for size, step in zip(sizes, steps, strict=True):
        if size > 1:
            pitch = step // pixels if pitch is None else pitch
            if step != pitch * pixels:
                return None
        pixels *= size
    pitch = channels if pitch is None else pitch
    is_apart = pitch >= channels and (channels == 1 or x.stride(1) == 1)
    return pitch if is_apart and pitch * pixels < MOST_NUMBERS else None


def compile_ahead(
    site: Site | Attention, config: str, pitch: int | None, capability: int, cache: str
) -> None:
    """Compile kernels into Triton's cache on disk, in a process that has no GPU of its own."""
    with _no_gpu(capability, cache):
        if isinstance(site, Attention):
            from torch_nimble.kernels.attending import compile_for

            compile_for(site, config, capability)
            return
        dtype = given = getattr(torch, site.dtype)
        for launch in launches_of(site, config, capability, pitch):
            made = torch.float32 if launch.parts > 1 else dtype
            types = (given, dtype, torch.float32 if site.is_scaled else dtype, dtype, made)
            launch.kernel.warmup(*types, grid=launch.grid, **launch.constants)
            given = made


@contextlib.contextmanager
def _no_gpu(capability: int, cache: str) -> Iterator[None]:
    """Triton as if there was such a GPU, with that cache."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class NoDriver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = cache
    driver.set_active(NoDriver())
    try:
        yield
    finally:  # others compile in this process, too
        driver.set_active(None)
        os.environ.pop("TRITON_CACHE_DIR")
        os.environ.update({} if before is None else {"TRITON_CACHE_DIR": before})


def result_of(x: Tensor, site: Site) -> Tensor:
    """Memory for the result."""
    size = site.window.size(*site.image[2:])
    return torch.empty(
        (site.image[0], site.made, *size),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, *rest: Any
) -> Tensor:
    site, config = site_of(x, weight, bias, added, *rest), rest[-1]
    result = result_of(x, site)
    bias = weight if bias is None else bias  # not looked at then
    added = result if added is None else added
    for launch in launches_of(site, config, capability_of(x.device), pitch_of(x)):
        out = result
        if launch.parts > 1:
            several = (launch.parts, result.numel())
            out = torch.empty(several, dtype=torch.float32, device=x.device)
        launched(launch, f"{config} for {site}", x, weight, bias, added, out)
        x = out
    return result


def _made(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, *rest: Any) -> Tensor:
    return result_of(x, site_of(x, weight, bias, added, *rest))


library.impl("convolve", _convolve, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("torch_nimble::convolve", _made, lib=library)
convolve: Callable[..., Tensor] = torch.ops.torch_nimble.convolve.default
