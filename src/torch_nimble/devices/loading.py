"""What takes long to load: torch's libraries when first used, modules of Inductor, and Triton by itself.

Before it looks up a kernel, Triton reads all of its own files. None of the three needs the others, nor
the loop that looks at weights, which has to be compiled: each has a thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from torch_nimble.execute.check import relative_error
from torch_nimble.execute.streams import Streams
from torch_nimble.lower import inductor
from torch_nimble.watch.tensors import by_compiled_code

log = logging.getLogger("torch_nimble")


@contextlib.contextmanager
def libraries_loading(device: torch.device) -> Iterator[None]:
    """Load these once in a process, at the same time and beside what is done inside."""
    threads = [
        threading.Thread(target=_load_once, args=(load, device), name=f"torch-nimble {load.__name__}")
        for load in (_use_libraries, _know_compiler, _compile_loop)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


@functools.cache
def _load_once(load: Callable[[torch.device], None], device: torch.device) -> None:
    try:
        with torch.cuda.device(device), torch.no_grad():
            load(device)
    except Exception as reason:  # whoever needs it will meet it again, and can say so
        log.info("libraries could not be loaded beforehand: %s", reason)


def _use_libraries(device: torch.device) -> None:
    """cuBLAS, cuDNN with a window and with none, by other parts of itself, and what compares results.

    What libraries make for a thread is the next one's when that has ended.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        Streams.of(device).make_handles()
        image = torch.zeros(1, 8, 8, 8, dtype=torch.float16, device=device)
        image = image.contiguous(memory_format=torch.channels_last)
        for side in (3, 1):
            F.conv2d(image, image.new_zeros(8, 8, side, side))
        relative_error(image, image)
    stream.synchronize()


def _know_compiler(_: torch.device) -> None:
    inductor.know_compiler()


def _compile_loop(_: torch.device) -> None:
    by_compiled_code()
