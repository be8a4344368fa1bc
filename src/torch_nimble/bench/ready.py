"""Systems made ready for what is measured, and what that takes: seconds, and memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_nimble.bench import gpu
from torch_nimble.bench.record import Json
from torch_nimble.bench.subject import Call, Inputs, Subject
from torch_nimble.bench.systems import BY_NAME

_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """The process with these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def prepare(subject: Subject, name: str, samples: Sequence[Inputs]) -> tuple[Call, Json]:
    """A system ready for every sample; and what that took."""
    system = BY_NAME[name]
    firsts = samples[:1] if system.serves_many_sizes else samples

    def make() -> list[Call]:
        return [system.make(subject, sample) for sample in firsts]

    return made_ready(subject, name, make, samples, system.preparing)


def made_ready(
    subject: Subject,
    name: str,
    make: Callable[[], list[Call]],
    samples: Sequence[Inputs],
    preparing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[Call, Json]:
    """What `make` makes, called until nothing is new to it; and what that took."""
    part = subject.part
    caches = {variable: str(Path(part.cache, tail)) for variable, tail in _CACHES.items()}
    before = gpu.memory(part.device, restart=True)
    start = time.perf_counter()
    with environment(caches), preparing():
        calls = make()
        after_s = []
        for _ in range(4):  # torch.compile records its graph at the second call
            for call, (args, kwargs) in zip(itertools.cycle(calls), samples, strict=False):
                call(*args, **kwargs)
                subject.synchronize()
            after_s.append(time.perf_counter() - start)
    peak = gpu.memory(part.device, peak=True)
    held = gpu.memory(part.device, restart=True)
    for call, (args, kwargs) in zip(itertools.cycle(calls), samples, strict=False):
        call(*args, **kwargs)
        subject.synchronize()
    running = gpu.memory(part.device, peak=True)
    memory = {"before": before, "peak": peak, "held": held, "running": running}
    more = {"preparing": peak, "added": held, "own": running}
    memory |= {name: {key: now[key] - before[key] for key in now} for name, now in more.items()}
    notes: Json = {"memory": memory}
    if not (part.turns or part.finds_caches):
        notes |= {"prepare_s": after_s[0], "ready_s": after_s[-1]}
    if name.startswith("nimble"):
        notes["explained"] = explained(calls[0])
    return calls[0], notes


def explained(engine: Any) -> Json:
    """What an engine says of its first signature, and what runs eagerly."""
    found = engine.explain().to_dict()
    return {**(found.get("signatures") or [{}])[0], "fallbacks": found.get("fallbacks", [])}
