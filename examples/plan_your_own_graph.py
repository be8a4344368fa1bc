"""Use the scheduler on a graph that has nothing to do with torch, and with a planner of one's own."""

from torch_nimble import Task, TaskGraph, schedule

GRAPH = TaskGraph.from_edges(
    [
        Task("load", cost_us=4.0),
        Task("parse", cost_us=3.0),
        Task("index", cost_us=5.0),
        Task("rank", cost_us=2.0),
        Task("render", cost_us=1.0),
    ],
    [("load", "parse"), ("load", "index"), ("parse", "rank"), ("index", "rank"), ("rank", "render")],
)


def main() -> None:
    plan = schedule.max_concurrency(GRAPH)
    schedule.verify(GRAPH, plan)
    print(f"{plan.streams} streams, {plan.waits} waits, width {plan.width}")
    for launch in plan.launches:
        waits = f" after {', '.join(launch.waits)}" if launch.waits else ""
        print(f"  stream {launch.stream}: {launch.task}{waits}")

    length, path = schedule.critical_path(GRAPH)
    print(f"critical path {length} µs: {' → '.join(path)}")
    print(f"simulated {schedule.simulate(GRAPH, plan).total_us} µs")

    mine = schedule.plan_from_streams(GRAPH, {task.name: 0 for task in GRAPH.tasks}, name="one stream")
    schedule.verify(GRAPH, mine)
    print(f"{mine.planner}: {schedule.simulate(GRAPH, mine).total_us} µs")


if __name__ == "__main__":
    main()
