"""Layers as one call of a library that can do what comes after them, too.

`cudnn` convolves with a bias, a tensor to add and ReLU in its own kernel. `cublas` takes a 1×1
convolution for the matrix product that it is. Libraries win where there is much to do.
"""

from __future__ import annotations

import torch

from torch_nimble.kernels.sites import Site

Tensor = torch.Tensor


def run(
    site: Site, family: str, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None
) -> Tensor:
    """The layer's result, channels-last."""
    return (
        _by_cudnn(site, x, weight, bias, added)
        if family == "cudnn"
        else _by_cublas(site, x, weight, bias, added)
    )


def _by_cudnn(
    site: Site, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None
) -> Tensor:
    window = (site.window.stride, site.window.padding, site.window.dilation)
    if added is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *window, 1)
    return torch.cudnn_convolution_add_relu(x, weight, added, 1.0, bias, *window, 1)


def _by_cublas(
    site: Site, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None
) -> Tensor:
    rows = x.permute(0, 2, 3, 1).reshape(-1, site.image[1])
    if bias is not None and site.after == "relu":
        made = torch._addmm_activation(bias, rows, weight)
    elif added is not None:
        made = torch.addmm(added.permute(0, 2, 3, 1).reshape(-1, site.made), rows, weight)
    else:
        made = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    images, _, height, width = site.image
    return made.view(images, height, width, site.made).permute(0, 3, 1, 2)
