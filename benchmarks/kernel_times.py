"""What our kernels take on the convolutions of real networks, beside cuDNN: one line of JSON for each.

    python benchmarks/kernel_times.py nasnet-a-mobile fp16 > times.jsonl

Each time is that of one call in a CUDA graph of many, one after another, the shortest of some replays;
biases are part of all, activations of ours only (cuDNN needs another kernel for them). Needs a GPU.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from kernels import convolution, depthwise, separable
from kernels.parts import Window
from torch import nn

from torch_nimble import zoo

CALLS, REPLAYS = 20, 5
Shape = tuple[tuple[int, ...], tuple[int, ...], tuple[int, int], tuple[int, int], tuple[int, int]]


def main(network: str, dtype: torch.dtype) -> None:
    torch.backends.cudnn.allow_tf32 = True
    alone, pairs = found_in(network)
    for shape, count in alone.items():
        show(network, dtype, count, shape, *times_of(shape, dtype))
    for (first, second), count in pairs.items():
        show(network, dtype, count, (*first, *second), *times_of_pair(first, second, dtype))


def show(
    network: str, dtype: torch.dtype, count: int, shape: object, library: float, ours: dict
) -> None:
    best = min(ours, key=ours.get) if ours else None
    line = {
        "network": network,
        "dtype": str(dtype),
        "count": count,
        "shape": shape,
        "cudnn_us": round(library, 2),
        "ours_us": round(ours[best], 2) if best else None,
        "config": best,
    }
    print(json.dumps(line), flush=True)


def found_in(network: str) -> tuple[Counter[Shape], Counter[tuple[Shape, Shape]]]:
    """The convolutions of images in a network, and those of single channels with a 1×1 after them."""
    loaded = zoo.load(network, calibrate=False)
    order: list[Shape] = []

    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        padding = module.padding
        assert isinstance(padding, tuple)
        weight = tuple(module.weight.shape)
        order.append((tuple(args[0].shape), weight, module.stride, padding, module.dilation))

    for module in loaded.model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(note)
    with torch.no_grad():
        loaded.model(*loaded.args, **loaded.kwargs)
    pairs = Counter(
        (first, second)
        for first, second in itertools.pairwise(order)
        if is_depthwise(first) and second[1][1:] == (first[1][0], 1, 1)
    )
    known = [shape for shape in order if is_depthwise(shape) or shape[1][1] == shape[0][1]]
    return Counter(known), pairs


def is_depthwise(shape: Shape) -> bool:
    image, weight, *_ = shape
    return weight[1] == 1 and weight[0] == image[1] > 1


def window_of(shape: Shape) -> Window:
    _, weight, stride, padding, dilation = shape
    return Window((weight[2], weight[3]), stride, padding, dilation)


def image_of(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(size, device="cuda", dtype=torch.float32)
    return made.to(dtype=dtype, memory_format=torch.channels_last)


def times_of(shape: Shape, dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    image, size, stride, padding, dilation = shape
    x, weight = image_of(image, dtype), image_of(size, dtype)
    bias = torch.randn(size[0], device="cuda").to(dtype)
    groups = image[1] if is_depthwise(shape) else 1

    def library() -> torch.Tensor:
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)

    window = window_of(shape)
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    if is_depthwise(shape):
        laid_out = depthwise.lay_out(weight)
        for config in depthwise.CONFIGS:
            runs[str(config)] = lambda config=config: depthwise.depthwise(
                x, laid_out, bias, window, before="relu", config=config
            )
    elif size[1] >= 16:
        laid_out = convolution.lay_out(weight)
        for config in convolution.CONFIGS:
            space = convolution.workspace(x, size[0], window, config)
            runs[str(config)] = lambda config=config, space=space: convolution.convolution(
                x, laid_out, bias, window, space, after="relu", config=config
            )
    return per_call_us(library), {name: per_call_us(run) for name, run in runs.items()}


def times_of_pair(first: Shape, second: Shape, dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    x, weight = image_of(first[0], dtype), image_of(first[1], dtype)
    across = image_of(second[1], dtype)
    biases = [torch.randn(shape[1][0], device="cuda").to(dtype) for shape in (first, second)]

    def library() -> torch.Tensor:
        y = F.conv2d(x, weight, biases[0], first[2], first[3], first[4], first[0][1])
        return F.conv2d(y, across, biases[1])

    laid_out, matrix = depthwise.lay_out(weight), across[:, :, 0, 0].t().contiguous()
    runs = {
        str(config): lambda config=config: separable.separable(
            x, laid_out, biases[0], matrix, biases[1], window_of(first), before="relu", config=config
        )
        for config in separable.CONFIGS
    }
    return per_call_us(library), {name: per_call_us(run) for name, run in runs.items()}


def per_call_us(run: Callable[[], torch.Tensor]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                run()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            stream.synchronize()
            times.append(start.elapsed_time(end) * 1000 / CALLS)
    return min(times)


if __name__ == "__main__":
    half = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    main(sys.argv[1], half[sys.argv[2]])
