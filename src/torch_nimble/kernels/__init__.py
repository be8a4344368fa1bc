"""Kernels of our own, for what libraries are slow at: convolutions of few images, attention of few rows.

One file a family, each with a note of its floor. Convolutions work on channels-last images: `x` lies as
(image, row, column, channel), weights are laid out ahead of time. What comes before a convolution (an
activation) and after it (a bias, another tensor to add, an activation) is part of its kernel. Every
number that is known ahead of time is a constant of the kernel, so that addresses cost next to nothing.

- sites, heads: what layers and attention have to compute, and in which ways it can be cut. Need neither
  torch nor triton.
- operator, attending: the operators that stand for them in a graph.
- depthwise, convolution, vector, attention: the kernels; parts: what they share. Need triton, and are
  imported only where it is there.
"""
