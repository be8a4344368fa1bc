"""Triton kernels of our own, for what libraries are slow at: small convolutions of single images.

One file a family, each with a note of its floor. All work on channels-last images: `x` lies as (image,
row, column, channel), weights are laid out ahead of time. What comes before a convolution (an
activation) and after it (a bias, another tensor to add, an activation) is part of its kernel. Needs
triton. No part of the package: kernel_times.py beside this finds out whether any of them wins, and only
then it is to become one.
"""
