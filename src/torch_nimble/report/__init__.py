"""A plan to look at: one page with its timeline, its graph, its tasks and how it was chosen.

kinds      what sort of work a task is
work       the bytes it moves and the operations it takes
floors     where the time goes by kind of work, and the least that such work can take
measures   numbers of a timeline: idle time, the longest path, steps
contents   everything a report says, as a value
page       that value as HTML
trace      the same timeline as Trace Event Format

All of it is pure and needs no torch; the times come from `schedule.simulate` or from a real pass
(`execute/timelines.py`).
"""

from torch_nimble.report.contents import Race, Report, Times, report_of
from torch_nimble.report.page import save_page
from torch_nimble.report.trace import save_trace

__all__ = ["Race", "Report", "Times", "report_of", "save_page", "save_trace"]
