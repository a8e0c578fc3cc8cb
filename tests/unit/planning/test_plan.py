"""A plan is data: it can be compared, stored and read back, and nothing can change it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ddpopt.planning.plan import Bucket, Cut, Plan, Segment
from tests.support.refusals import refusal

PLAN = Plan(
    buckets=(
        Bucket(0, ("head.bias", "head.weight"), 80, "float32", "cpu", 1, "head.weight brings it to 80 bytes"),
        Bucket(1, ("body.weight",), 64, "float32", "cpu", 0, "backward ends here"),
    ),
    segments=(
        Segment(0, 0, ("linear", "relu"), ("body.weight",), (1,)),
        Segment(1, 0, ("linear_1",), ("head.weight", "head.bias"), (0,)),
    ),
    cuts=(Cut(0, "linear_1", "bucket 0 is complete"),),
    unread=("spare",),
)


def with_bucket(**changes: Any) -> Plan:
    """The plan with another first bucket."""
    first, second = PLAN.buckets
    return replace(PLAN, buckets=(replace(first, **changes), second))


# ------------------------------------------------------------------------------------------ JSON


def edited(**changes: Any) -> str:
    document = json.loads(PLAN.to_json()) | changes
    return json.dumps({key: value for key, value in document.items() if value is not ...})


MISSING = "TypeError: Plan.__init__() missing 1 required positional argument:"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "AttributeError: 'list' object has no attribute 'get'"),
        ('{"buckets": []}', "KeyError: 'ddpopt_plan'"),
        (edited(ddpopt_plan=2), "ValueError: format 2, which another version wrote; this one has 1"),
        ("buckets:", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (edited(fingerprint=...), "KeyError: 'fingerprint'"),
        *((edited(**{key: ...}), f"{MISSING} {key!r}") for key in ("buckets", "segments", "cuts")),
    ],
)
def test_something_else_and_what_lacks_a_part_is_refused(text: str, said: str) -> None:
    wanted = f"expected a plan that ddpopt wrote, got something else: {said}. Make it again"
    assert refusal(lambda: Plan.from_json(text)) == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"buckets": 3},
        {"buckets": [3]},
        {"buckets": [{"index": 0}]},
        {"cuts": [{"graph": 0, "after": "linear", "reason": ""}]},
        {"buckets": [{**json.loads(PLAN.to_json())["buckets"][0], "device": None}]},
    ],
    ids=repr,
)
def test_a_malformed_part_is_a_usage_error(changes: dict[str, Any]) -> None:
    assert "expected a plan that ddpopt wrote" in refusal(lambda: Plan.from_json(edited(**changes)))


def test_a_plan_that_was_edited_after_it_was_written_is_refused() -> None:
    document = json.loads(PLAN.to_json())
    document["buckets"][0]["params"].reverse()
    assert refusal(lambda: Plan.from_json(json.dumps(document))) == (
        "expected a plan that ddpopt wrote, got something else: ValueError: its content has fingerprint "
        "'f0014d0adc476150', but it says '26e68ea9facd4576': it was edited. Make it again"
    )


# ----------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_is_the_same_in_every_process_and_on_every_platform() -> None:
    # Pinned: hash seeds, platforms and Python versions may not enter. A new FORMAT may change it.
    assert PLAN.fingerprint == "26e68ea9facd4576"


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, policy="ddp"),
        with_bucket(params=("head.weight", "head.bias")),
        with_bucket(nbytes=81),
        with_bucket(dtype="bfloat16"),
        with_bucket(segment=0),
        with_bucket(device="cuda:0"),
        replace(PLAN, buckets=PLAN.buckets[:1]),
        replace(PLAN, segments=PLAN.segments[:1]),
        replace(PLAN, segments=(replace(PLAN.segments[0], nodes=("linear",)), PLAN.segments[1])),
        replace(PLAN, segments=(replace(PLAN.segments[0], graph=1), PLAN.segments[1])),
    ],
)
def test_the_fingerprint_differs_where_two_ranks_would_reduce_or_cut_differently(other: Plan) -> None:
    assert other.fingerprint != PLAN.fingerprint


def test_reasons_and_which_device_a_rank_uses_do_not_enter_the_fingerprint_but_how_many() -> None:
    def on(*devices: str) -> Plan:
        pairs = zip(PLAN.buckets, devices, strict=True)
        return replace(PLAN, buckets=tuple(replace(bucket, device=device) for bucket, device in pairs))

    first, second, both = on("cuda:0", "cuda:0"), on("cuda:1", "cuda:1"), on("cuda:0", "cuda:1")
    assert first.fingerprint == second.fingerprint != both.fingerprint
    assert with_bucket(reason="another word").fingerprint == PLAN.fingerprint
