"""Attention that a model writes out in steps: products with keys, softmax, and products with values.

Read backwards from the last product. What lies between may scale the products, add masks to them or hide
some of them, and change the dtype for a while, as long as nothing else reads what is made on the way. A
mask may be added to a view that tells windows of a batch apart, as shifted windows are masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_nimble.lower.passes.layout import reshape

_aten = torch.ops.aten
_PRODUCTS = frozenset([_aten.matmul.default, _aten.bmm.default])
_SOFTMAX = _aten.softmax.int
_RESHAPES = frozenset([reshape, _aten.reshape.default, _aten.view.default, _aten._unsafe_view.default])
_COPIES = frozenset([_aten.clone.default, _aten.contiguous.default, reshape, _aten.reshape.default])
_SAME = frozenset([_aten.clone.default, _aten.alias.default, _aten.contiguous.default])
_CASTS = frozenset([_aten.to.dtype, _aten._to_copy.default])
_FACTORS: Mapping[Any, Callable[[float], float]] = {
    _aten.mul.Tensor: lambda number: number,
    _aten.mul.Scalar: lambda number: number,
    _aten.div.Tensor: lambda number: 1 / number,
    _aten.div.Scalar: lambda number: 1 / number,
}


@dataclass(frozen=True, eq=False)
class Term:
    """A mask that is added to products."""

    node: fx.Node
    windows: tuple[int, ...] = ()
    """The first two sizes of the view to which it is added, of which the batch is the product."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Attention in steps."""

    last: fx.Node
    queries: fx.Node
    keys: fx.Node
    values: fx.Node
    across: bool
    """Whether keys are columns, as the product takes them."""
    scale: float
    terms: tuple[Term, ...]
    hidden: fx.Node | None
    """Where it is true, nothing is seen."""


@dataclass(frozen=True, eq=False)
class _Scores:
    """Products, and what has become of them."""

    product: fx.Node
    scale: float = 1.0
    terms: tuple[Term, ...] = ()
    hidden: fx.Node | None = None


def steps_at(last: fx.Node) -> Steps | None:
    """Attention whose last product a node is."""
    if last.target not in _PRODUCTS:
        return None
    node, values = _args(last)
    while _passes_on(node):
        (node,) = _args(node)[:1]
    if not (_is_only_read_here(node) and _is_softmax(node)):
        return None
    scores = _scores(_args(node)[0])
    if scores is None:
        return None
    queries, columns = _args(scores.product)
    queries, of_queries = _unscaled(queries)
    columns, of_columns = _unscaled(columns)
    keys, of_keys = _unscaled(_args(columns)[0]) if _swaps(columns) else (columns, 1.0)
    scale = scores.scale * of_queries * of_columns * of_keys
    across = keys is columns
    if not (math.isfinite(scale) and isinstance(values, fx.Node)):
        return None
    return Steps(last, queries, keys, values, across, scale, scores.terms, scores.hidden)


def lies_by_query(last: fx.Node) -> bool:
    """Whether whatever reads the result of attention in steps copies it query by query.

    Then it may as well be made so. What keeps the order that it lies in is no such copy.
    """
    return bool(last.users) and all(
        _permutes(user, (0, 2, 1, 3)) and user.users and all(map(_copies, user.users))
        for user in last.users
    )


def _copies(node: fx.Node) -> bool:
    made = node.meta.get("val")  # not of what brings rows to a kernel of ours, which takes any
    return node.target in _COPIES and (made is None or made.is_contiguous())


def of_windows(mask: torch.Tensor, windows: tuple[int, ...]) -> torch.Tensor:
    """A mask of a view that tells windows apart, for the batch that they are."""
    if mask.dim() < 4:
        return mask  # the same for all
    rest = mask.shape[-3:]
    return mask.expand(*windows, *rest).reshape(-1, *rest)


def _is_only_read_here(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1


def _passes_on(node: Any) -> bool:
    """Whether a node gives what it is given, perhaps in another dtype."""
    if not _is_only_read_here(node):
        return False
    if node.target is _aten.dropout.default:
        return not (_args(node)[1] and _args(node)[2])
    return node.target in _SAME or (node.target in _CASTS and _value(node).is_floating_point())


def _is_softmax(node: fx.Node) -> bool:
    """Over keys; in a dtype that is at least as exact as that of the products."""
    if node.target is not _SOFTMAX or node.kwargs:
        return False
    source, dim, *dtype = _args(node)
    is_wide = not dtype or dtype[0] in (None, torch.float32)
    return is_wide and dim in (-1, _value(source).dim() - 1)


def _scores(node: Any) -> _Scores | None:
    """The products that a node is made of."""
    if not _is_only_read_here(node):
        return None
    if node.target in _PRODUCTS:
        return _Scores(node)
    if _passes_on(node):
        return _scores(_args(node)[0]) if node.target not in _CASTS or _widens(node) else None
    if node.target in _FACTORS:
        found, factor = _scores(_args(node)[0]), _factor(node)
        is_first = found is not None and not found.terms and found.hidden is None
        return replace(found, scale=found.scale * factor) if found and is_first and factor else None
    if node.target is _aten.add.Tensor:
        return _sum(node, lambda source: _scores(source), ())
    if node.target is _aten.masked_fill.Scalar:
        return _hiding(node)
    if node.target in _RESHAPES:
        return _in_windows(node)
    return None


def _widens(node: fx.Node) -> bool:
    return _value(node).dtype in (torch.float32, _value(_args(node)[0]).dtype)


def _sum(
    node: fx.Node, scores_of: Callable[[Any], _Scores | None], windows: tuple[int, ...]
) -> _Scores | None:
    """Products and a mask, whichever of the two comes first."""
    if node.kwargs or len(_args(node)) != 2 or not all(isinstance(arg, fx.Node) for arg in _args(node)):
        return None
    made = _value(node)
    for source, mask in (_args(node), _args(node)[::-1]):
        if _value(source).shape == made.shape and source is not mask:
            found = scores_of(source)
            # Masks are added to each other first, and large ones to products in their own dtype.
            is_as_exact = _value(mask).dtype == made.dtype
            if found is not None and found.hidden is None and is_as_exact:
                return replace(found, terms=(*found.terms, Term(mask, windows)))
    return None


def _hiding(node: fx.Node) -> _Scores | None:
    source, hidden, number = _args(node)
    found = _scores(source)
    is_bool = isinstance(hidden, fx.Node) and _value(hidden).dtype == torch.bool
    is_larger = _value(node).shape != _value(source).shape
    if found is None or found.terms or found.hidden or number != -math.inf or not is_bool or is_larger:
        return None
    return replace(found, hidden=hidden)


def _in_windows(node: fx.Node) -> _Scores | None:
    """A mask for each of several windows, which a view of products has apart from the batch."""
    added, shape = _args(node)[0], tuple(_value(node).shape)
    if not (_is_only_read_here(added) and added.target is _aten.add.Tensor):
        return None
    apart = tuple(_value(added).shape)
    if len(apart) != 5 or (apart[0] * apart[1], *apart[2:]) != shape:
        return None

    def together(source: Any) -> _Scores | None:
        is_view = _is_only_read_here(source) and source.target in _RESHAPES
        return _scores(_args(source)[0]) if is_view and _value(_args(source)[0]).shape == shape else None

    return _sum(added, together, apart[:2])


def _factor(node: fx.Node) -> float:
    """The number that a node multiplies with; none is zero."""
    number = _args(node)[1]
    is_number = isinstance(number, int | float) and not isinstance(number, bool) and number
    return _FACTORS[node.target](float(number)) if is_number and not node.kwargs else 0.0


def _unscaled(node: Any) -> tuple[Any, float]:
    """What a node multiplies with a number, and the number."""
    factor = _factor(node) if isinstance(node, fx.Node) and node.target in _FACTORS else 0.0
    if not factor or _value(node).dtype != _value(_args(node)[0]).dtype:
        return node, 1.0
    return _args(node)[0], factor


def _swaps(node: Any) -> bool:
    """Whether a node exchanges rows and columns."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    dims = _value(node).dim()
    return _permutes(node, (*range(dims - 2), dims - 1, dims - 2))


def _permutes(node: fx.Node, order: Sequence[int]) -> bool:
    """Whether a node puts dimensions into that order."""
    dims = len(order)
    if node.target is _aten.permute.default:
        return [dim % dims for dim in _args(node)[1]] == list(order)
    if node.target is not _aten.transpose.int or _value(node).dim() != dims:
        return False
    one, other = (dim % dims for dim in _args(node)[1:])
    swapped = list(range(dims))
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return swapped == list(order)


def _args(node: Any) -> tuple[Any, ...]:
    arguments: tuple[Any, ...] = node.args
    return arguments


def _value(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
