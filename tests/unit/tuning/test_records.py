"""What was measured, as JSON: read back equal, or refused with what is wrong."""

from dataclasses import replace

import pytest
import torch

from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.tuning.records import Gradient, Link, Profile, Stored, plan_of

SPECS = [ParamSpec(f"p{index}", 4 * index, "float32", "cpu") for index in range(6)]
PROFILE = Profile(
    tuple(Gradient(spec, 0.1) for spec in SPECS),
    1.0,
    2.0,
    3.0,
    "inline",
    2,
    {"torch": str(torch.__version__)},
)
LINK = Link(1e-4, 1e-9, 0.0, 1.0, 0.05, "gloo", 2, {})


@pytest.mark.parametrize("stored", [PROFILE, LINK])
def test_what_was_stored_is_read_back_equal_and_nothing_else_is_read(stored: Stored) -> None:
    kind, text = type(stored).__name__.lower(), stored.to_json()
    assert type(stored).from_json(text) == stored
    wrong = {
        "{": f"expected a {kind} that ddpopt wrote, got something else: JSONDecodeError: Expecting",
        "[]": f"expected a {kind} that ddpopt wrote, got something else: AttributeError: 'list'",
        text.replace("world_size", "ranks"): "unexpected keyword argument 'ranks'. Measure it again",
        text.replace(
            f'"ddpopt_{kind}": 1', f'"ddpopt_{kind}": 2'
        ): "ValueError: another format than 1. Measure",
        text.replace('"ready_s"', '"at"').replace('"backend": "gloo"', '"x": 1'): ". Measure it again",
        text.replace('"world_size": 2', '"world_size": 0'): "ValueError: world_size is 0. Measure",
        text.replace("0.1", "NaN").replace('"busy": 1.0', '"busy": 0.5'): "ValueError: ",
        "[" * 100_000: "RecursionError",
    }
    for given, said in wrong.items():
        with pytest.raises(UsageError) as caught:
            type(stored).from_json(given, "--link a.json: ")
        assert str(caught.value).startswith(f"--link a.json: expected a {kind}")
        assert said in str(caught.value)


def test_a_profile_of_something_else_is_refused_with_what_differs() -> None:
    PROFILE.require_fit(plan_of([SPECS[::2], SPECS[1::2]], ""), 2)
    here = plan_of([[ParamSpec("p0", 8, "float64", "cpu")], SPECS[4:]], "")
    with pytest.raises(UsageError) as caught:
        replace(PROFILE, measured={"torch": "2.0"}).require_fit(here, 8)
    assert str(caught.value) == (
        "the profile is of something else:\n"
        f"  - torch: 2.0, here {torch.__version__}\n"
        "  - number of ranks: 2, here 8\n"
        "  - bytes of all gradients: 60, here 44\n"
        "  - parameter 'p0': float32, here float64\n"
        "  - parameter 'p1': float32, here none\n"
        "  - and 2 more"
    )
