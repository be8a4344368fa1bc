"""Scheduling of task graphs on streams: pure Python, no torch, usable on any graph.

reduce → matching → streams → waits      the maximum-concurrency plan
lanes → waits                            cost-aware list scheduling on k lanes
verify                                   checks any plan, trusting none of the above
simulate                                 a timeline for a plan and a table of costs
"""

from torch_nimble.schedule.planners import (
    Analysis,
    analyse,
    critical_first,
    lanes,
    max_concurrency,
    plan_from_streams,
    serial,
)
from torch_nimble.schedule.simulate import Span, Timeline, critical_path, simulate
from torch_nimble.schedule.verify import verify

__all__ = [
    "Analysis",
    "Span",
    "Timeline",
    "analyse",
    "critical_first",
    "critical_path",
    "lanes",
    "max_concurrency",
    "plan_from_streams",
    "serial",
    "simulate",
    "verify",
]
