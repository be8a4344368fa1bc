"""Plans on the CPU: one thread a stream, the machine's cores divided among them.

Torch releases the interpreter's lock inside operators, so operators of different streams really
overlap. A plan of one stream runs in the caller's own thread. Each wait is one lock that starts
taken: telling releases it, waiting takes it again, and so it is ready for the next run.

An exception in a task stops all streams before their next task and is raised in the caller, with a
note that says which task of which line of the model it was. So does Ctrl-C. The executable can be
run again afterwards.

While the caller is profiled, each task is a range of its name. Torch's profiler watches one thread only,
unless it is asked for all: then tasks run on their streams, and otherwise in the caller's thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from torch_nimble.execute.codegen import Compiled, compile_plan
from torch_nimble.execute.threads import default_intra_threads_kept, set_own_intra_threads
from torch_nimble.flags import profiled, profiled_here
from torch_nimble.lower import Lowered
from torch_nimble.plans import Plan
from torch_nimble.schedule import serial, verify

Tensor = torch.Tensor
_Named = Literal["here", "on streams"] | None
"""Whether tasks are ranges in a profile, and whether they then run in the caller's thread."""
_ONE_BY_ONE = "tasks of all streams one after another, since one thread is profiled"
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Halted(BaseException):
    """Raised inside a stream when another one has failed; never seen by callers."""


class CpuExecutable:
    """A verified plan, ready to run. Not reentrant: the owner serialises calls of `run`."""

    def __init__(self, lowered: Lowered, plan: Plan, *, intra_threads: int, timed: bool = False) -> None:
        verify(lowered.graph, plan)
        self.plan = plan
        self.intra_threads = intra_threads
        self.lowered = lowered
        self.spans: dict[str, tuple[float, float]] = {}
        self._constants: dict[str, Tensor] = {}
        self._timed = timed
        self._named: _Named = None
        self._assemble()

    def _assemble(self) -> None:
        """Code and threads of their own: those of an interrupted team must not touch the next one's.

        They are put in place when all is there, so that Ctrl-C before that leaves nothing half-made.
        """
        plan = serial(self.lowered.graph) if self._named == "here" else self.plan
        labels = None
        if self._named is not None:
            labels = {task.name: task.origin for task in self.lowered.graph.tasks}
        code = compile_plan(self.lowered.program, plan, timed=self._timed, labels=labels)
        code.namespace.update(
            self._constants,
            nimble__halt=(),
            nimble__Halted=Halted,
            nimble__spans=self.spans,
            nimble__now=time.perf_counter,
            nimble__range=_range,
        )
        team = _Team(code, self.intra_threads) if len(code.streams) > 1 else None
        self._code, self._team = code, team

    def bind(self, constants: Mapping[str, Tensor]) -> None:
        """Use these tensors as the program's constants and state from the next run on."""
        self._constants = {name: constants[name] for name in self.lowered.program.constants}
        self._code.namespace.update(self._constants)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One pass over the plan. `inputs` have the layouts of the program's input slots."""
        if self._team is not None and self._team.unfinished:
            self._team.close()
            self._assemble()
        code = self._code
        box: list[Any] = [None] * code.box_size
        for slot, tensor in zip(code.input_slots, inputs, strict=True):
            box[slot] = tensor
        try:
            code.begin(box)
            if self._team is not None:
                self._team.run(box)
            else:
                for stream in code.streams:
                    stream(box)
        except Exception as error:
            self._annotate(error)
            raise
        outputs = []
        for output, slot in zip(self.lowered.program.outputs, code.output_slots, strict=True):
            value = code.namespace[output.name].detach() if slot < 0 else box[slot]
            outputs.append(value.clone() if output.copy else value)
        return outputs

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One pass over the caller's tensors; those that lie otherwise are copied, and copied back."""
        slots = self.lowered.program.inputs
        inputs = [
            t if t.stride() == slot.strides else _relaid(t, slot.strides)
            for t, slot in zip(tensors, slots, strict=True)
        ]
        named = _named_for_profiler() if profiled() else None
        if named != self._named:
            self._name(named)
        with _range(_ONE_BY_ONE, "") if named == "here" and self.plan.streams > 1 else _NOTHING:
            results = self.run(inputs)
        for slot, tensor, used in zip(slots, tensors, inputs, strict=True):
            if slot.mutated and used is not tensor:
                tensor.copy_(used)
        return results

    def _name(self, named: _Named) -> None:
        """Other code for the same plan: with ranges for a profiler, or without."""
        self._named = named
        if self._team is not None:
            self._team.unfinished = True  # if Ctrl-C comes before there is another
            self._team.close()
        self._assemble()

    def rebind(self, constants: Mapping[str, Tensor]) -> None:
        """Use these tensors as the program's constants from the next run on."""
        self.bind(constants)

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """The constants in use."""
        return self._constants

    def close(self) -> None:
        """End the threads. The executable cannot be run afterwards."""
        if self._team is not None:
            self._team.close()
        self._constants.clear()
        self._code.namespace.clear()  # a thread that ends may hold it

    def _annotate(self, error: BaseException) -> None:
        traceback = error.__traceback__
        while traceback is not None:
            lines = self._code.tasks_by_line.get(traceback.tb_frame.f_code.co_filename, {})
            name = lines.get(traceback.tb_lineno)
            if name is not None:
                task = self.lowered.graph.tasks[self.lowered.graph.index[name]]
                error.add_note(
                    f"torch-nimble: in task {task.name!r} ({task.kind}), "
                    f"from {task.origin or 'the model'}"
                )
            traceback = traceback.tb_next


def _named_for_profiler() -> _Named:
    """Where the profiler that is on sees tasks: it watches this thread alone, or all, or another."""
    return "here" if profiled_here() else "on streams"


def _range(name: str, origin: str) -> torch.profiler.record_function:
    """A range in torch's profiler."""
    return torch.profiler.record_function(name, origin or None)


class _Team:
    """One thread a stream, waiting for runs. After Ctrl-C a team is closed and a new one made."""

    def __init__(self, code: Compiled, intra_threads: int) -> None:
        self.unfinished = False
        """Whether a run has begun and not come to its end: after Ctrl-C, wherever that arrived."""
        self._halt: list[bool] = []
        self._errors: list[BaseException] = []
        self._job: tuple[list[Any], bool] | None = None
        self._waits = [_taken() for _ in code.waits]
        self._go = [_taken() for _ in code.streams]
        self._done = [_taken() for _ in code.streams]
        self._busy = [False] * len(code.streams)
        self._finalizer = weakref.finalize(self, _end, self._go)
        code.namespace["nimble__halt"] = self._halt
        for (wait, tell), lock in zip(code.waits, self._waits, strict=True):
            code.namespace.update({wait: lock.acquire, tell: lock.release})
        with default_intra_threads_kept():
            for number, stream in enumerate(code.streams):
                threading.Thread(
                    target=_serve,
                    args=(weakref.ref(self), number, stream, self._go[number], self._done[number]),
                    kwargs={"intra_threads": intra_threads},
                    name=f"torch-nimble stream {number}",
                    daemon=True,
                ).start()
            for done in self._done:
                done.acquire()

    def run(self, box: list[Any]) -> None:
        """All streams once; the first error of any of them is raised here."""
        self._job = (box, torch.is_inference_mode_enabled())
        self.unfinished = True  # first, because Ctrl-C may end the clearing up below as well
        try:
            for go in self._go:
                go.release()
            for done in self._done:
                done.acquire()
        except BaseException:  # Ctrl-C, anywhere between these lines
            self.close()
            raise
        self._job = None
        errors = self._errors[:1]
        if errors:
            self._errors.clear()
            self._halt.clear()
            for lock in self._waits:
                lock.acquire(blocking=False)
        self.unfinished = False
        if errors:
            raise errors[0]

    def work(self, number: int, stream: Any) -> bool:
        """What a thread does for one run; False if there is nothing to do any more."""
        self._busy[number] = True
        job = self._job
        if job is None:
            self._busy[number] = False
            return False
        box, inference = job
        try:
            # The order matters: leaving inference mode turns gradients on.
            with torch.inference_mode(inference), torch.no_grad():
                stream(box)
        except Halted:
            pass
        except BaseException as error:
            if not self._halt:
                self._errors.append(error)
            self._stop()
        self._busy[number] = False
        return True

    def close(self) -> None:
        """Stop the streams, wait until none is inside a task, and let the threads end.

        If Ctrl-C ends this early, it can be done again.
        """
        self._job = None
        self._stop()
        while any(self._busy):
            time.sleep(0.001)
        _end(self._go)
        self._finalizer.detach()

    def _stop(self) -> None:
        """Let every stream stop before its next task, those that wait included."""
        self._halt.append(True)
        for lock in self._waits:
            with contextlib.suppress(RuntimeError):  # released already
                lock.release()


def _relaid(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy in the layout that the plan was made for."""
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _serve(
    team: weakref.ref[_Team],
    number: int,
    stream: Any,
    go: threading.Lock,
    done: threading.Lock,
    *,
    intra_threads: int,
) -> None:
    """The life of a thread: it holds no strong reference to its team while it waits."""
    set_own_intra_threads(intra_threads)
    done.release()
    while True:
        go.acquire()
        alive = team()
        if alive is None or not alive.work(number, stream):
            return
        del alive
        done.release()


def _end(go: list[threading.Lock]) -> None:
    for lock in go:
        with contextlib.suppress(RuntimeError):  # released already, and not taken yet
            lock.release()
