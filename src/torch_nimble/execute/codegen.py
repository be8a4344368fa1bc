"""A plan as Python source: one straight-line function a stream.

Looking up tasks and arguments in tables costs more than small operators do; straight-line code with
local names does not. A value that another stream needs travels through a slot of a shared list, one
slot for each stream that takes it. Every stream drops its name for a value after its own last use,
so memory is freed as soon as no later task of any stream needs it.

    def nimble__stream_1(nimble__box):
        nimble__wait_3()                        # until stream 0 has filled the slot
        if nimble__halt: raise nimble__Halted
        relu_2 = nimble__box[7]; nimble__box[7] = None
        conv2d_4 = nimble__op_9(relu_2, conv2d_4_weight, conv2d_4_bias, [1, 1], [0, 0], [1, 1], 1)
        del relu_2
        nimble__box[11] = conv2d_4
        nimble__tell_5()

Values keep the names they have in the graph; the prefix keeps ours apart from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_nimble.execute.bindings import binding
from torch_nimble.lower.program import Call, Program, Ref
from torch_nimble.plans import Launch, Plan

BEGIN = "nimble__begin"
"""The function that takes the inputs and makes views of them, as if it were a stream."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """The functions of a plan, the names they use, and where everything is in the shared list."""

    begin: Callable[[list[Any]], None]
    streams: tuple[Callable[[list[Any]], None], ...]
    namespace: dict[str, Any]
    waits: tuple[tuple[str, str], ...]
    """(name of the waiting function, name of the telling function) for each wait."""
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    box_size: int
    tasks_by_line: Mapping[str, Mapping[int, str]]
    """For each source file name, the task that a line belongs to."""


class _Slots:
    """Numbers for (value, stream that takes it)."""

    def __init__(self) -> None:
        self.number: dict[tuple[str, Any], int] = {}

    def of(self, value: str, taker: Any) -> int:
        return self.number.setdefault((value, taker), len(self.number))


def compile_plan(
    program: Program, plan: Plan, *, timed: bool = False, labels: Mapping[str, str] | None = None
) -> Compiled:
    """Functions for a verified plan. With `timed`, the start and end of each task are recorded too.

    With `labels`, each task is a range in torch's profiler, and says there where it comes from.
    """
    by_stream: dict[Any, list[Launch]] = {}
    for launch in plan.launches:
        by_stream.setdefault(launch.stream, []).append(launch)
    calls: dict[Any, list[Call]] = {
        stream: [call for launch in launches for call in program.tasks[launch.task]]
        for stream, launches in by_stream.items()
    }
    calls[BEGIN] = list(program.preamble)
    home: dict[str, Any] = {slot.name: BEGIN for slot in program.inputs}
    home |= {call.name: where for where, made in calls.items() for call in made}
    output_names = dict.fromkeys(
        output.name for output in program.outputs if output.name not in program.constants
    )

    slots = _Slots()
    namespace: dict[str, Any] = {}
    numbers = _wait_numbers(plan)
    told: dict[str, list[int]] = {}
    for (earlier, _), number in numbers.items():
        told.setdefault(earlier, []).append(number)
    takers = _takers(calls, home, output_names)
    functions: dict[Any, Callable[[list[Any]], None]] = {}
    tasks_by_line: dict[str, Mapping[int, str]] = {}
    for where in (BEGIN, *by_stream):
        writer = _Writer(where, calls[where], home, takers, slots, namespace)
        writer.open(program)
        for launch in by_stream.get(where, ()):
            awaited = [numbers[earlier, launch.task] for earlier in dict.fromkeys(launch.waits)]
            calls_of = program.tasks[launch.task]
            label = None if labels is None else labels[launch.task]
            writer.launch(launch.task, calls_of, awaited, told.get(launch.task, []), timed, label)
        if where == BEGIN:
            for call in program.preamble:
                writer.call(call)
        source = writer.close()
        filename = f"<torch_nimble plan {id(namespace):x} {writer.name}>"
        exec(compile(source, filename, "exec"), namespace)
        functions[where] = namespace.pop(writer.name)  # it refers to the namespace
        tasks_by_line[filename] = writer.task_of_line
    return Compiled(
        begin=functions[BEGIN],
        streams=tuple(functions[stream] for stream in by_stream),
        namespace=namespace,
        waits=tuple((f"nimble__wait_{k}", f"nimble__tell_{k}") for k in range(len(numbers))),
        input_slots=tuple(slots.of(slot.name, BEGIN) for slot in program.inputs),
        output_slots=tuple(
            slots.of(output.name, "caller") if output.name in output_names else -1
            for output in program.outputs
        ),
        box_size=len(slots.number),
        tasks_by_line=tasks_by_line,
    )


def _wait_numbers(plan: Plan) -> dict[tuple[str, str], int]:
    """A number for each (task waited for, task that waits)."""
    pairs = [(earlier, launch.task) for launch in plan.launches for earlier in launch.waits]
    return {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}


def _takers(
    calls: Mapping[Any, list[Call]], home: Mapping[str, Any], outputs: Iterable[str]
) -> dict[str, list[Any]]:
    """For each value the streams other than its own that read it, the caller included."""
    takers: dict[str, dict[Any, None]] = {}
    for where, made in calls.items():
        for call in made:
            for name in call.refs():
                if name in home and home[name] != where:
                    takers.setdefault(name, {})[where] = None
    for name in outputs:
        takers.setdefault(name, {})["caller"] = None
    return {name: list(found) for name, found in takers.items()}


class _Writer:
    """Source of one function, line by line."""

    def __init__(
        self,
        where: Any,
        calls: Iterable[Call],
        home: Mapping[str, Any],
        takers: Mapping[str, list[Any]],
        slots: _Slots,
        namespace: dict[str, Any],
    ) -> None:
        self.where = where
        self.name = BEGIN if where == BEGIN else f"nimble__stream_{where}"
        self.home, self.takers, self.slots, self.namespace = home, takers, slots, namespace
        self.lines = [f"def {self.name}(nimble__box):"]
        self.task_of_line: dict[int, str] = {}
        self.uses_left: dict[str, int] = {}
        for call in calls:
            for name in call.refs():
                self.uses_left[name] = self.uses_left.get(name, 0) + 1
        self.held: set[str] = set()
        self.indent = "    "

    def line(self, text: str) -> None:
        self.lines.append(f"{self.indent}{text}")

    def open(self, program: Program) -> None:
        """Take the inputs, in the function that begins."""
        if self.where == BEGIN:
            for slot in program.inputs:
                number = self.slots.of(slot.name, BEGIN)
                self.line(f"{slot.name} = nimble__box[{number}]; nimble__box[{number}] = None")
                self._made(slot.name)

    def launch(
        self,
        task: str,
        calls: tuple[Call, ...],
        awaited: Iterable[int],
        told: Iterable[int],
        timed: bool,
        label: str | None,
    ) -> None:
        first = len(self.lines) + 1
        for number in awaited:
            self.line(f"nimble__wait_{number}()")
        self.line("if nimble__halt: raise nimble__Halted")
        if timed:
            self.line("nimble__start = nimble__now()")
        if label is not None:
            self.line(f"with nimble__range({task!r}, {label!r}):")
            self.indent = "        "
        for call in calls:
            self.call(call)
        if label is not None:
            self.line("pass")  # a task may have no call
        self.indent = "    "
        if timed:
            self.line(f"nimble__spans[{task!r}] = (nimble__start, nimble__now())")
        for number in told:
            self.line(f"nimble__tell_{number}()")
        self.task_of_line.update(dict.fromkeys(range(first, len(self.lines) + 1), task))

    def call(self, call: Call) -> None:
        for name in dict.fromkeys(call.refs()):
            if name in self.home and self.home[name] != self.where and name not in self.held:
                number = self.slots.of(name, self.where)
                self.line(f"{name} = nimble__box[{number}]; nimble__box[{number}] = None")
                self.held.add(name)
        arguments = [self._source(value) for value in call.args]
        arguments += [f"{key}={self._source(value)}" for key, value in call.kwargs.items()]
        self.line(f"{call.name} = {self._named(binding(call.target), 'op')}({', '.join(arguments)})")
        for name in call.refs():
            self.uses_left[name] -= 1
        self._made(call.name)
        self._drop(dict.fromkeys(call.refs()))

    def close(self) -> str:
        self.line("return")
        return "\n".join(self.lines) + "\n"

    def _made(self, name: str) -> None:
        """Hand a new value to the streams that take it, and forget it if nobody here needs it."""
        self.held.add(name)
        for taker in self.takers.get(name, ()):
            self.line(f"nimble__box[{self.slots.of(name, taker)}] = {name}")
        self._drop([name])

    def _drop(self, names: Iterable[str]) -> None:
        done = [name for name in names if name in self.held and not self.uses_left.get(name)]
        if done:
            self.line(f"del {', '.join(done)}")
            self.held.difference_update(done)

    def _source(self, value: Any) -> str:
        if isinstance(value, Ref):
            return value.name
        if isinstance(value, list):
            return f"[{', '.join(map(self._source, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(self._source(item) + ', ' for item in value)})"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._named(value, "const")

    def _named(self, value: Any, kind: str) -> str:
        name = f"nimble__{kind}_{id(value):x}"
        self.namespace[name] = value
        return name
