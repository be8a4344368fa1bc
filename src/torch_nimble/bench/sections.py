"""What the page of a record shows, and in which order: text, figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_nimble.bench import figures, grids, hardware, kernels, losses
from torch_nimble.bench.record import Json
from torch_nimble.bench.selection import (
    batched,
    newest,
    of,
    on_one_gpu,
    quicker_peers,
    sound,
    streamed,
    targets_of,
)
from torch_nimble.bench.suites import BRANCHING, PAPER_IDLE
from torch_nimble.look import Grid


@dataclass(frozen=True)
class Section:
    """A part of the page: text that is ours, figures by file name, and tables."""

    name: str
    title: str
    text: str
    figures: tuple[tuple[str, str], ...] = ()
    grids: tuple[Grid, ...] = ()

    @property
    def empty(self) -> bool:
        return not any(svg for _, svg in self.figures) and not any(grid.rows for grid in self.grids)


def sections_of(entries: Sequence[Json], readings: Mapping[str, str]) -> list[Section]:
    """What the page shows, in its order; sections that the record has nothing for are left out."""
    kept = newest(entries)
    gpu, speed = on_one_gpu(kept), of(kept, "speed")
    paper, modern = (of(gpu, "speed", targets_of(suite), plain=True) for suite in ("paper", "modern"))
    # Without those of the paper's suite, which have figures of their own.
    modern = [entry for entry in modern if entry not in paper]
    branching, plain = streamed(gpu, BRANCHING), of(gpu, "speed", plain=True)
    timed = [*speed, *of(kept, "train")]
    sizes, fair = batched(gpu), sound(timed)
    lost = sum(map(bool, map(quicker_peers, fair)))
    repeated = of(entries, "speed") + of(entries, "plan")
    sections = [
        Section(
            "paper",
            "The paper's inference figure",
            "Times faster than eager, one bar a system; whiskers are quartiles over the rounds. The "
            "dashed bars are the paper's own figures, on a V100 against PyTorch 1.4: another GPU and "
            "another eager.",
            (("speedup.svg", figures.speedups(paper, "Inference, speed-up over eager", True)),),
            (grids.against_eager(paper),),
        ),
        Section(
            "conditions",
            "Conditions",
            "Every machine, set of versions and commit that lines of this record come from. Systems "
            "are measured in one process in interleaved rounds, on the same weights and inputs; a time "
            "is that of the whole call, from the caller's tensor to a synchronised result, unless said "
            "otherwise.",
            grids=(grids.conditions(entries),),
        ),
        Section(
            "results",
            "Results",
            "p50 of the whole call in µs. A ratio is the median of those of the rounds; in brackets are "
            "their quartiles. Error: relative, against the model in float64. Wrong: that is too large; "
            "what is wrong takes part in no ratio. max-autotune tunes for minutes a network: the suites "
            "have it for three, in fp16; XLA (JAX) is there for ResNet-50.",
            grids=(grids.headline(of(kept, "speed", plain=True) or speed),),
        ),
        Section(
            "slower",
            "Where ours is slower",
            f"In {lost} of {len(fair)} results a peer is faster: the median of the ratios of the rounds "
            "is below 1. Each is listed, by however little, with what we make of it."
            + _left_out(len(timed) - len(fair))
            + " Below: where a peer needs less by another measure (p99 of a call, a call in a row that "
            "nobody waits for, energy of a call), likewise; and where our own kernels on one stream are "
            f"faster than the chosen plan in a row, {losses.BY_MORE}.",
            grids=(losses.slower(timed, readings), losses.behind(timed, readings)),
        ),
        Section(
            "streams",
            "Several streams against one",
            "The same kernels, replayed from one stream and from the plan that preparation chose by "
            "measuring. Width: the most tasks that do not depend on each other. Of the paper's own "
            "table we know one figure only, its largest, which is of NASNet-A mobile; the others are "
            "left empty.",
            (("streams.svg", figures.multistream(branching)),),
            (grids.streams(branching),),
        ),
        Section(
            "scheduling",
            "What run-time scheduling costs",
            "The paper's motivating experiment: eager's own kernels, scheduled by PyTorch at run time, "
            "and replayed from one CUDA graph. Nothing else differs.",
            (("scheduling.svg", figures.without_scheduling(paper)),),
            (grids.scheduling(plain),),
        ),
        Section(
            "idle",
            "How long the GPU is idle",
            "The share of a call in which no kernel runs. The dotted line is the largest figure that "
            f"the paper gives for PyTorch, {PAPER_IDLE:.0%}.",
            (("idle.svg", figures.idleness(paper)),),
            (grids.idle(plain),),
        ),
        Section(
            "modern",
            "Networks since the paper",
            "Transformers, newer convolutional networks and models of many small parts, as above.",
            (("modern.svg", figures.speedups(modern, "Newer networks, speed-up over eager", False)),),
            (grids.against_eager(modern),),
        ),
        Section(
            "training",
            "Training steps",
            "p50 of a whole step in µs: forward, backward and update with SGD and momentum. Images of "
            "CIFAR-10's size; texts of 128 tokens. cudagraph: an eager step in one CUDA graph. The "
            "dashed bars are the paper's own figures, on a V100 against PyTorch 1.4.",
            (("training.svg", figures.training(of(gpu, "train"))),),
            (grids.training(of(gpu, "train")),),
        ),
        Section(
            "step-memory",
            "Memory of training steps",
            "MiB, each system in a process of its own: what torch reserves for steps (weights, "
            "gradients, the optimizer's state, what forward keeps), and the most it had in use and "
            "reserved while the step was made ready. Below: steps for which ours reserves more than "
            "torch.compile does, with what we make of it.",
            grids=(
                grids.step_memory(of(kept, "train-memory")),
                losses.larger(of(kept, "train-memory"), readings),
            ),
        ),
        Section(
            "batches",
            "Larger batches, and a busy GPU",
            "Several streams help while one kernel does not fill the GPU; larger batches fill it. Busy: "
            "measured while another stream keeps the GPU at work.",
            (("batches.svg", figures.by_batch([e for e in sizes if not e["load"]])),),
            (grids.batches(sizes),),
        ),
        Section(
            "latency",
            "Every latency",
            "p50 / p99 of the whole call in µs, over the calls of all rounds.",
            grids=(grids.latency(speed),),
        ),
        Section(
            "steadiness",
            "How even the rounds were",
            "The slowest round over the fastest. What needs the host in each call varies with it, since "
            "others use the machine, too; eager's kernels in one CUDA graph, in a row, hardly need it. "
            "Of ours, those calls need it most whose look at the weights, while the GPU works, takes "
            "as long as the GPU: networks of many tensors and short tasks.",
            grids=(hardware.steadiness(timed),),
        ),
        Section(
            "limits",
            "Replay and its limits",
            "Replay: our CUDA graph alone, without what else a call does; where that was not measured, "
            "the table says what stands instead of it. Up to commit 948dbae a replay is the fastest of "
            "five rows of twenty, since then their median. Critical path: the longest path of measured "
            "times of single tasks, scaled so that all of them take what one stream took. Floor: the "
            "least time for the arithmetic and the memory traffic at the highest rates measured on this "
            "GPU. Last, the graphs of others, likewise alone.",
            grids=(hardware.limits(of(gpu, "speed")),),
        ),
        Section(
            "kernels",
            "Kernels",
            "Convolutions, small linear layers and attention for which kernels of ours were tried: what "
            "all of these layers take by the library's kernels, with bias and activation, and by the "
            "chosen ones, each timed by itself. Below: what the tasks of our plans take one after "
            "another, and what share each kind of work has in that.",
            grids=(kernels.tried(plain), kernels.shares(plain)),
        ),
        Section(
            "intervals",
            "Calls that nobody waits for",
            "µs a call, or a training step, in a row that nobody waits for, each launched as soon as "
            "the host can: the host's time or the device's, whichever is longer.",
            grids=(grids.intervals(of(gpu, "speed")), grids.intervals(of(gpu, "train"))),
        ),
        Section(
            "cost",
            "What preparation costs",
            "Seconds to the first answer in a fresh process, cold with empty caches and warm with "
            "filled ones, and the peak of reserved memory in MiB.",
            grids=(grids.costs(of(kept, "cost")),),
        ),
        Section(
            "memory",
            "Memory",
            "MiB, each system in a process of its own: the most that torch had in use and reserved "
            "while it was made ready for that many batch sizes, and what is reserved from then on.",
            grids=(grids.memory(of(kept, "memory")),),
        ),
        Section(
            "plans",
            "Saved plans",
            "A plan that was saved, used in a fresh process, against one stream.",
            grids=(grids.plans(of(kept, "plan")),),
        ),
        Section(
            "calls",
            "The host's part of a call",
            "Time until the host has launched the work, and until the call returns, unsynchronised.",
            grids=(grids.calls(of(kept, "call")),),
        ),
        Section(
            "energy",
            "Energy",
            "Millijoules of the device a call.",
            grids=(hardware.energy(of(kept, "speed")),),
        ),
        Section(
            "checks",
            "Is it right?",
            "Relative errors on inputs that no system was prepared with, before and after timing, the "
            "larger. A check could have failed if the result for another input is at least a hundred "
            "tolerances away. What is not right is listed first; it takes part in no ratio, mean or "
            "figure.",
            grids=(grids.wrong([*timed, *of(kept, "plan")]), grids.checks(timed)),
        ),
        Section(
            "agreement",
            "Do repeated runs agree?",
            f"{grids.agreed(repeated)} How far the speed-ups of repeated runs are apart, largest over "
            "smallest. Where more than one commit is named, what changed between these is in it, too. "
            "Where runs are further apart, only ratios of one run should be put beside each other. "
            "Elsewhere the newest run that has all systems counts.",
            grids=(grids.agreement(repeated),),
        ),
        Section(
            "failures",
            "What failed",
            "Every error of a system or of a whole process, with its text, and what ran eagerly.",
            grids=(grids.failures(kept),),
        ),
        Section(
            "settings",
            "Settings",
            "Every setting, with each value that it had.",
            grids=(grids.settings(entries),),
        ),
    ]
    return [s for s in sections if not s.empty or (s.name == "slower" and timed)]


def _left_out(count: int) -> str:
    """What is not among the results that can be won or lost."""
    return f" Not counted: {count} in which ours failed or is wrong." if count else ""
