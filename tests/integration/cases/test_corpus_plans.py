"""The plan of every case of the corpus at a cap of 1 MiB (or the case's own), as it is today.

For each bucket: the segment that completes it, its size and its parameters; for each cut, its graph and the
node that opens the later segment. A plan that changes shows here, and whoever changes it says why:
``python -m tests.integration.cases.test_corpus_plans > tests/data/corpus_plans.txt`` writes them all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.dynamo.capture import capture
from ddpopt.explanation.explain import explain_case
from ddpopt.planning.plan import Bucket, Plan

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SNAPSHOTS = (Path(__file__).parents[2] / "data" / "corpus_plans.txt").read_text().strip().split("\n\n")
PLANS = {text.partition(":")[0]: text for text in SNAPSHOTS}
LONG = ("bert", "resnet", "t5", "vit")
"""Whole models, which take longest to trace; by day test_corpus_training.py trains them with their plans."""


def each_case() -> list[Any]:
    """By day every second case that is not long."""
    by_day = [case for case in corpus.cases() if case.name not in LONG][::2]
    return [
        pytest.param(case, id=case.name, marks=() if case in by_day else pytest.mark.nightly)
        for case in corpus.cases()
    ]


@pytest.mark.parametrize("case", each_case())
def test_the_plan_of_a_case_is_what_it_was(case: Case) -> None:
    assert f"{case.name}: {as_text(plan_of(case))}" == PLANS.get(case.name)


def test_each_plan_is_of_a_case() -> None:
    assert list(PLANS) == [case.name for case in corpus.cases()]


WITHIN_ONE_CALL = [("lstm_cell", 0.3), ("lstm_cell", 2.5), ("rnn_cell", 0.3), ("list", 0.3)]


@pytest.mark.parametrize(("name", "cap"), [*WITHIN_ONE_CALL, ("no_grad", 0.3)])
def test_gradients_fill_buckets_in_eagers_order(name: str, cap: float) -> None:
    found = explain_case(corpus.case(name), {"bucket_cap_mb": cap}, "inline")
    assert [{*b.params} for b in found.plan.buckets] == [{*b.params} for b in found.ddp.buckets]


def plan_of(case: Case) -> Plan:
    """The plan of a case, after a look at how many graphs Dynamo makes of it."""
    args, kwargs = case.inputs(0, 0)
    limits: dict[str, Any] = {"bucket_cap_mb": 1, **case.ddp_kwargs}
    captured = capture(case.model(), *args, strategy="split", **kwargs, **limits)
    assert (case.name, len(captured.graphs)) == (case.name, case.graphs)
    return captured.plan


def as_text(plan: Plan) -> str:
    lines = [f"{len(plan.buckets)} buckets in {len(plan.segments)} segments"]
    lines += map(bucket_as_text, plan.buckets)
    lines += [f"  cut {cut.graph}: {cut.before}" for cut in plan.cuts]
    lines += [f"  unread: {shortened(plan.unread)}"] if plan.unread else []
    return "\n".join(lines)


def bucket_as_text(bucket: Bucket) -> str:
    size = f"{bucket.nbytes / 1024:.1f} KiB" + ("" if bucket.dtype == "float32" else f" {bucket.dtype}")
    return f"  {bucket.index} <- {bucket.segment}: {size}, {shortened(bucket.params)}"


def shortened(names: Sequence[str]) -> str:
    """All names if they are short; else the ends, and how many lie between."""
    text = " ".join(names)
    return text if len(text) <= 80 else f"{names[0]} .. {len(names) - 2} .. {names[-1]}"


if __name__ == "__main__":
    for number, each in enumerate(corpus.cases()):
        torch._dynamo.reset()
        print("\n" * bool(number) + f"{each.name}: {as_text(plan_of(each))}")  # noqa: T201  # its output
