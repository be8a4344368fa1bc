"""Which values of an exported graph are the same memory, and what of that schemas do not say."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from torch_nimble.capture.callee import Callee
from torch_nimble.capture.failure import origin
from torch_nimble.errors import CaptureError
from torch_nimble.transforms import unwrapped

_aten = torch.ops.aten
_MAY_WRITE = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)
# They update running statistics, and their schemas do not say so.
_WRITE_UNSEEN = frozenset(
    [_aten.batch_norm.default, _aten.instance_norm.default, _aten.native_batch_norm.default]
)
_MAY_BE_VIEWS = (
    _aten.einsum,
    _aten.sum_to_size,
    _aten.alpha_dropout,
    _aten.atleast_1d,
    _aten.atleast_2d,
    _aten.atleast_3d,
    _aten.broadcast_tensors,
    _aten.conj_physical,
    _aten.dropout,
    _aten.feature_alpha_dropout,
    _aten.feature_dropout,
    _aten.meshgrid,
    _aten.type_as,
    _aten.unsafe_chunk,
    _aten.unsafe_split,
    _aten.unsafe_split_with_sizes,
)
MAY_BE_VIEWS = frozenset(
    one
    for packet in _MAY_BE_VIEWS
    for one in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
    if not one._schema.is_mutable
)
"""They may return their argument, or views of it, and their schemas do not say so."""
_DROPOUTS = frozenset(
    [
        _aten.alpha_dropout.default,
        _aten.alpha_dropout_.default,
        _aten.dropout.default,
        _aten.dropout_.default,
        _aten.feature_alpha_dropout.default,
        _aten.feature_alpha_dropout_.default,
        _aten.feature_dropout.default,
        _aten.feature_dropout_.default,
    ]
)


def drop_nothing(graph: fx.Graph) -> None:
    """Remove dropout that returns its argument: a graph made functional would take it for a copy.

    And in place it would look as if it wrote. An input that is a result stays one of the graph's own.
    """
    output = graph.output_node()
    for node in list(graph.nodes):
        if node.target in _DROPOUTS and (not node.args[2] or node.args[1] == 0):
            source = node.args[0]
            if source.op != "placeholder" or output not in node.users:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def refuse_hidden_statistics(callee: Callee, graph: fx.Graph) -> None:
    """CaptureError for operators that write running statistics, which nothing makes plain writes."""
    for node in graph.nodes:
        if node.target is _aten.instance_norm.default:
            writes = node.args[5] and node.args[3] is not None
        elif node.target is _aten.batch_norm_update_stats.default:
            writes = any(given is not None for given in node.args[1:3])
        else:
            continue
        if writes:
            line = origin(node) or callee.location
            raise CaptureError(
                f"cannot capture {callee.name}: at {line}: {node.target} writes running statistics "
                "without saying so. Call eval() on the norms, or give them none "
                "(track_running_stats=False)"
            )


def refuse_written_constants(callee: Callee, program: torch.export.ExportedProgram) -> None:
    """CaptureError if something is written that the trace has met outside of buffers and inputs.

    Whose it is nobody knows: a buffer, too, is found in a list or an object as a tensor of no name.
    """
    specs = program.graph_signature.input_specs
    constants = {spec.arg.name for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR}
    known = _Aliases(program.graph)
    for node in program.graph.nodes:
        for written in _written_by(node):
            root = known.root(written)
            if root.name in constants:
                line = origin(node) or callee.location
                raise CaptureError(
                    f"cannot capture {callee.name}: at {line}: {node.target} writes a tensor of shape "
                    f"{tuple(root.meta['val'].shape)} that is kept elsewhere than in a buffer, or is "
                    "reached by another way than the buffer's name, such as a list or an object. Use "
                    "register_buffer and write to that attribute of the module, or pass the tensor with "
                    "the inputs, or use torch.compile(backend='nimble')"
                )


def refuse_hidden_views(callee: Callee, graph: fx.Graph) -> None:
    """CaptureError if something is written, and read by another name that may be a view of it.

    To make a graph functional goes by schemas, and some operators' do not say that they return views.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    known, same = _Aliases(graph), dict[Any, list[fx.Node]]()
    for node in graph.nodes:
        same.setdefault(_memory_of(node), []).append(node)
    for node, place in position.items():
        for written in _written_by(node):
            aliases = same[_memory_of(written)]
            hidden = [n for n in aliases if known.root(n) is not known.root(written)]
            by = sorted({str(maker.target) for n in aliases if (maker := _hiding(known.root(n)))})
            for other in hidden if by else ():
                if other.op == "placeholder" or any(position[u] > place for u in other.users):
                    line = origin(node) or callee.location
                    raise CaptureError(
                        f"cannot capture {callee.name}: at {line}: {node.target} writes a tensor that "
                        "may be the same as another that is read afterwards, by way of "
                        f"{', '.join(by)}, which does not say so. Write to a clone()"
                    )


def _memory_of(node: fx.Node) -> Any:
    """Equal for values of the same memory, as they were traced."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return unwrapped(value).untyped_storage()._cdata
    return node


def _written_by(node: fx.Node) -> list[fx.Node]:
    """What an operator writes, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.is_write
    ]
    every = (item for value in given for item in (value if isinstance(value, list | tuple) else [value]))
    return [item for item in every if isinstance(item, fx.Node)]


class _Aliases:
    """Values that may be the same memory by what schemas say."""

    def __init__(self, graph: fx.Graph) -> None:
        self._above: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            schema = getattr(node.target, "_schema", None)
            returns = schema.returns if schema is not None else ()
            is_one_of_several = node.target is operator.getitem and _hiding(node) is None
            if is_one_of_several or any(result.alias_info for result in returns):
                for other in node.all_input_nodes[:1]:
                    if self.root(node) is not self.root(other):
                        self._above[self.root(node)] = self.root(other)

    def root(self, node: fx.Node) -> fx.Node:
        """One value that stands for all of the same memory."""
        while node in self._above:
            node = self._above[node]
        return node


def _hiding(node: fx.Node) -> fx.Node | None:
    """The operator that has made a value, perhaps with others, if that may be a view of anything."""
    maker = node.args[0] if node.target is operator.getitem else node
    return maker if isinstance(maker, fx.Node) and maker.target in MAY_BE_VIEWS else None


def writes_only_its_own(graph: fx.Graph) -> bool:
    """Whether no operator writes memory that was there before, and none hides what it does."""
    made_here: dict[Any, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None and node.target is not operator.getitem:
            return False
        base = made_here.get(node.args[0], False) if node.args else False
        if schema is None:
            made_here[node] = base
            continue
        if node.target.namespace != "aten" and _MAY_WRITE in node.target.tags:
            return False
        for i, argument in enumerate(schema.arguments):
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            written = given if isinstance(given, list | tuple) else [given]
            if argument.is_write and not all(made_here.get(value, False) for value in written):
                return False
        if node.target in _WRITE_UNSEEN and node.args[5] and node.args[3] is not None:
            return False
        # What may be a view of its first argument is of the graph's own making only if that is.
        is_fresh = all(result.alias_info is None for result in schema.returns)
        made_here[node] = base or (is_fresh and node.target not in MAY_BE_VIEWS)
    return True


def writes_parts(graph: fx.Graph) -> bool:
    """Whether an operator writes a view: what that makes of the whole, its schema does not say."""
    return any(_is_view(written) for node in graph.nodes for written in _written_by(node))


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    aliases = [result.alias_info for result in schema.returns] if schema is not None else []
    return any(alias is not None and not alias.is_write for alias in aliases)
