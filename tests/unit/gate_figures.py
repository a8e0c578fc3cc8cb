"""Figures made by hand, for the tests of the gate's files and reports."""

from dataclasses import replace

from ddpopt.gate.comparison import Comparison
from ddpopt.gate.figures import BucketRow, CaseFigures, Figures, ModeFigures, PlanFigures
from ddpopt.gate.moved import Change

MODE = ModeFigures(
    graphs=1,
    recompiles=0,
    compiled=1,
    backward={"allreduce": 2},
    outside={},
    aligned=True,
    potential=1.0,
    margins={"L0": 0.0, "L1": 0.3},
)
PLAN = PlanFigures(
    "0123456789abcdef", 2, (BucketRow(("b", "c"), 2048, "float32"), BucketRow(("a",), 1024, "float32"))
)
CASE = CaseFigures(PLAN, {"ddpopt-inline": MODE})
FIGURES = Figures({"gpt": CASE, "tied": CASE}, {"gpt": {"planning": 0.5, "compile, x": 1.0}}, {"tests": 7})


def with_mode(mode: ModeFigures) -> Figures:
    """The figures with another mode in the first case."""
    return replace(FIGURES, cases={**FIGURES.cases, "gpt": replace(CASE, modes={"ddpopt-inline": mode})})


def comparison(*changes: Change, left_out: tuple[str, ...] = ()) -> Comparison:
    return Comparison("ci/baseline.json", "torch 2.13", FIGURES, changes, left_out)
