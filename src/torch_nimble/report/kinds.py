"""What sort of work a task is, by the name of its operator or kernel.

Names are all that tasks from every lowering have in common: `aten.conv2d.default` is an operator,
`triton_poi_fused_add_relu_3` a kernel of Inductor's, which says how it iterates and what it fuses.
"""

from __future__ import annotations

import re

KINDS = (
    "convolution",
    "matrix product",
    "attention",
    "pooling",
    "normalisation",
    "reduction",
    "elementwise",
    "memory",
    "other",
)

_FUSED = re.compile(r"triton_(?P<form>[a-z0-9]+)_fused_?(?P<rest>\w*?)(_\d+)?")
# `convert_element_type` is no convolution, and `linalg_vector_norm` normalises nothing.
_CONVOLUTION = re.compile(r"conv(?!ert)")
_NORMALISATION = re.compile(r"(batch|layer|group|instance|rms|response|weight)_?norm")
_PRODUCT = re.compile(r"(^|_)(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|einsum|dot|mv|addmv)(_|$)")
_REDUCTION = re.compile(
    r"(^|_)(sum|mean|amax|amin|max|min|aminmax|argmax|argmin|prod|softmax|logsumexp|var|std|norm|topk|sort"
    r"|argsort|cumsum|cumprod|any|all|loss|cross_entropy|bincount|unique)(_|$)"
)
_MEMORY = re.compile(
    r"(^|_)(cat|stack|copy|clone|pad|index|gather|scatter|embedding|slice|select|split|unbind|chunk|fill"
    r"|zero|zeros|ones|full|arange|empty|contiguous|roll|flip|expand|repeat|permute|transpose|view|reshape"
    r"|constant|upsample|unfold|im2col|channels_last|readable|with_strides|tril|triu)(_|$)"
)
_ELEMENTWISE = re.compile(
    r"(^|_)(add|sub|rsub|mul|div|addcmul|addcdiv|lerp|pow|sqrt|rsqrt|square|reciprocal|neg|abs|sign|exp|expm1"
    r"|log|log1p|log2|sin|cos|tan|tanh|atan2|erf|sigmoid|relu|relu6|prelu|gelu|silu|elu|selu|celu|mish|glu"
    r"|softplus|hardtanh|hardswish|hardsigmoid|clamp|clip|threshold|where|maximum|minimum|masked|eq|ne|lt|le"
    r"|gt|ge|and|or|xor|not|floor|ceil|round|trunc|fmod|remainder|dropout|bernoulli|rand|randn|normal|uniform"
    r"|nan|isnan|isfinite|convert|foreach|fused)(_|$)"
)
_BY_NAME = (
    ("attention", re.compile(r"attention")),
    ("convolution", _CONVOLUTION),
    ("pooling", re.compile(r"pool")),
    ("normalisation", _NORMALISATION),
    ("matrix product", _PRODUCT),
    ("reduction", _REDUCTION),
    ("memory", _MEMORY),
    ("elementwise", _ELEMENTWISE),
)


def kind_of(operator: str) -> str:
    """One of `KINDS`; `other` for what is not known."""
    fused = _FUSED.fullmatch(operator)
    if fused is not None:
        return _fused_kind(fused["form"], fused["rest"])
    return _named_kind(_base(operator))


def _base(operator: str) -> str:
    """`conv2d` of `aten.conv2d.default` or `aten::conv2d`."""
    parts = re.split(r"\.|::", operator)
    return parts[1] if len(parts) > 1 else parts[0]


def _named_kind(name: str) -> str:
    return next((kind for kind, pattern in _BY_NAME if pattern.search(name)), "other")


def _fused_kind(form: str, fused: str) -> str:
    """A kernel that iterates over elements may carry the name of a convolution, whose bias it adds."""
    if form == "tem":
        return next(
            (k for k, p in _BY_NAME if k in ("attention", "convolution") and p.search(fused)),
            "matrix product",
        )
    if "pool" in fused:
        return "pooling"
    if form in ("red", "per"):
        return "normalisation" if _NORMALISATION.search(fused) else "reduction"
    if _ELEMENTWISE.search(fused) or not _MEMORY.search(fused):
        return "elementwise"
    return "memory"
