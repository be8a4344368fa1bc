"""What a network would take on a GPU that is not here: its tasks, and a time for each.

- fusing: operators that a GPU would run as one kernel become one task.
- costs: a time for each task by what it moves and computes, with numbers fitted to measurements.
- sharing: when each task of a plan runs, if those that run together share the GPU.

Needs no torch: it works on task graphs, whose buffers know their shapes.
"""

from torch_nimble.estimate.costs import GPUS, Gpu, estimated, load_gpu
from torch_nimble.estimate.fusing import fuse

__all__ = ["GPUS", "Gpu", "estimated", "fuse", "load_gpu"]
