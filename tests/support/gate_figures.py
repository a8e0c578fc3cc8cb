"""Figures made by hand, for the tests of the gate's files and reports."""

from ddpopt.gate.baseline import Figure, Figures
from ddpopt.gate.comparison import Change, Comparison

MODE: dict[str, Figure] = {
    "verdict": "ok",
    "levels": ["L3", "L0", "L1"],
    "graphs": 1,
    "collectives per backward": "2 allreduce",
    "overlap, as a share of eager DDP's": 1.0,
}
PLAN: dict[str, Figure] = {
    "fingerprint": "0123456789abcdef",
    "segments": 2,
    "unread parameters": [],
    "bucket 0": ["0.002 MiB float32", "b", "c"],
    "bucket 1": ["0.001 MiB float32", "a"],
}
CASE = {"plan": PLAN, "ddpopt-inline": MODE}
FIGURES: Figures = {"gpt": CASE, "tied": CASE}


def with_mode(**figures: Figure) -> Figures:
    """The figures with others in the mode of the first case."""
    return {**FIGURES, "gpt": {**CASE, "ddpopt-inline": {**MODE, **figures}}}


def comparison(*changes: Change, left_out: tuple[str, ...] = ()) -> Comparison:
    return Comparison("ci/baseline.json", "torch 2.13", 2, FIGURES, changes, left_out)
