"""What a command is pointed at: a network of the zoo, an object in a module, or a file.

nasnet-a-mobile            a network of the zoo
package.module:name        a module, a function, or a function or class that returns a module
graph.json                 a bare task graph
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_nimble.errors import InputError, OptionError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
    **{name: name for name in ("float32", "float16", "bfloat16", "float64")},
}
_INPUT = re.compile(r"(?P<shape>\d+(x\d+)*|scalar)(:(?P<dtype>[a-z0-9]+))?")


@dataclass(frozen=True)
class Target:
    """A model with example inputs."""

    name: str
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str

    def inputs(self) -> str:
        """Shapes and dtypes of the example inputs, in words."""
        from torch_nimble.tree import flatten_inputs

        return ", ".join(
            f"{'x'.join(map(str, t.shape)) or 'scalar'} {str(t.dtype).removeprefix('torch.')}"
            for t in flatten_inputs(self.args, self.kwargs)[0]
        )


def is_graph_file(target: str) -> bool:
    """Whether the target is a file with a task graph."""
    return target.endswith(".json")


def load_target(
    target: str, inputs: Sequence[str] = (), dtype: str | None = None, device: str = "cpu"
) -> Target:
    """The model of that name, its inputs replaced by `inputs` and its dtype by `dtype` if given.

    A network of the zoo is made on `device`; all else is where whoever wrote it has put it.
    """
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"--dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    args = make_inputs(inputs)
    if ":" in target:
        found = _from_module(target, args)
    else:
        from torch_nimble import zoo

        network = zoo.load(target, device=device)
        found = Target(network.name, network.model, network.args, network.kwargs, network.source)
        if inputs:
            found = Target(found.name, found.model, args, {}, found.source)
    return found if dtype is None else _converted(found, dtype)


def device_of(name: str | None) -> torch.device:
    """What `--device` names; without it a GPU if there is one that this torch can use."""
    import torch

    here = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name or here)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise OptionError(f"--device {name!r} is not known; there are cuda and cpu")
    if device.type == "cuda" and here != "cuda":
        raise OptionError("--device cuda needs a GPU that this torch can use, and there is none")
    return device


def make_inputs(specs: Sequence[str], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random tensors for shapes such as `1x3x224x224` or `1x128:int64`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = []
    for spec in specs:
        match = _INPUT.fullmatch(spec)
        if match is None:
            raise OptionError(
                f"--input {spec!r} is not a shape; write sizes with 'x' between them and, if it is "
                "not float32, a dtype, for example 1x3x224x224 or 1x128:int64"
            )
        dtype = getattr(torch, match["dtype"] or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise OptionError(
                f"--input {spec!r} has the dtype {match['dtype']!r}, which torch does not know; there "
                "are float32, float16, bfloat16, float64, int64, int32, bool and others"
            )
        shape = [] if match["shape"] == "scalar" else [int(n) for n in match["shape"].split("x")]
        if dtype.is_floating_point or dtype.is_complex:
            made.append(torch.randn(shape, generator=generator).to(dtype))
        else:
            made.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
    return tuple(made)


def module_file(target: str) -> str | None:
    """The file of a target's module, which is not loaded; OptionError if there is no such module."""
    path = target.partition(":")[0]
    _import_from_here()
    try:
        spec = importlib.util.find_spec(path)
    except (ImportError, ValueError) as reason:
        raise OptionError(f"cannot import {path!r} for the target {target!r}: {reason}") from reason
    if spec is None:
        raise OptionError(f"there is no module {path!r} for the target {target!r}, here or installed")
    return spec.origin


def _import_from_here() -> None:
    """Modules in the current folder can be imported, as with `python -m`."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _from_module(target: str, args: tuple[torch.Tensor, ...]) -> Target:
    import torch

    path, _, name = target.partition(":")
    _import_from_here()
    try:
        module = importlib.import_module(path)
    except Exception as reason:  # whatever a module does when it is imported
        raise OptionError(
            f"cannot import {path!r} for the target {target!r}: {_said(reason, path)}"
        ) from reason
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(f"{path!r} has no {name!r}; it has {_public_names(module)}")
        found = getattr(found, part)
    if not args:
        raise OptionError(f"{target!r} needs example inputs; give them with --input 1x3x224x224 …")
    if isinstance(found, torch.nn.Module):
        return Target(target, found, args, {}, path)
    if not callable(found):
        raise OptionError(f"{target!r} is a {type(found).__name__}, not a module or a function")
    takes_nothing = not any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(found).parameters.values()
    )
    if takes_nothing:
        try:
            made = found()
        except Exception as reason:
            raise OptionError(f"calling {target!r} failed: {_said(reason, path)}") from reason
        if isinstance(made, torch.nn.Module):
            return Target(target, made.eval(), args, {}, path)
    if inspect.isclass(found):
        raise OptionError(f"{target!r} is a class that cannot be made without arguments; "
                          "point at a function that returns the module")  # fmt: skip
    return Target(target, found, args, {}, path)


def _said(reason: Exception, module: str) -> str:
    """What it says, and the last line of the target's module on the way to it."""
    own = Path(getattr(sys.modules.get(module), "__file__", None) or f"{module.replace('.', '/')}.py")
    frames = traceback.extract_tb(reason.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == own.name]
    first = next(iter(str(reason).strip().splitlines()), "")
    kind = "" if isinstance(reason, ImportError) else f"{type(reason).__name__}: "
    return f"{kind}{first}" + (f" ({own.name}:{lines[-1]})" if lines else "")


def _converted(target: Target, dtype: str) -> Target:
    import torch

    from torch_nimble.tree import flatten_inputs, unflatten_inputs

    wanted = getattr(torch, DTYPES[dtype])
    tensors, structure = flatten_inputs(target.args, target.kwargs)
    cast = [t.to(wanted) if t.is_floating_point() else t for t in tensors]
    args, kwargs = unflatten_inputs(structure, cast)
    if not isinstance(target.model, torch.nn.Module):
        raise InputError(f"--dtype needs a module to convert, and {target.name!r} is a function")
    return Target(target.name, target.model.to(wanted), tuple(args), kwargs, target.source)


def _public_names(module: Any) -> str:
    return ", ".join(name for name in vars(module) if not name.startswith("_")) or "nothing"
