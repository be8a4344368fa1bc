"""Triton kernels of our own, for what libraries are slow at: small convolutions of single images.

One file a family, each with a note of its floor. All work on channels-last images: `x` lies as (image,
row, column, channel), weights are laid out ahead of time. What comes before a convolution (an
activation) and after it (a bias, another tensor to add, an activation) is part of its kernel. Needs
triton. Plans do not use them yet: benchmarks/kernel_times.py finds out where they would win.
"""
