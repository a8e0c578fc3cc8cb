"""What was measured, as JSON: read back equal, or refused with what is wrong."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import imposed_plan
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec, specs_from_ddp
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.stored import Stored
from ddpopt.tuning.tune import tune

SPECS = [ParamSpec(f"p{index}", 4 * index + 4, "float32", "cpu") for index in range(6)]
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
        text.replace(f'"ddpopt_{kind}": 2', f'"ddpopt_{kind}": 1'): (
            "ValueError: format 1, which another version wrote; this one has 2. Measure it again"
        ),
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
    PROFILE.require_fit(reversed(SPECS), ranks=(2, 2))
    here = [replace(SPECS[0], nbytes=8), replace(SPECS[1], sparse=True), *SPECS[2:-1]]
    elsewhere = replace(PROFILE, measured={"torch": "2.0+cpu"})
    with pytest.raises(UsageError) as caught:
        elsewhere.require_fit(here, ranks=(2, 8), strategy=("eager", "inline"))
    assert str(caught.value) == (
        "the profile is of something else:\n"
        f"  - torch: 2.0, here {torch.__version__.partition('+')[0]}\n"
        "  - ranks: 2, here 8\n"
        "  - strategy: eager, here inline\n"
        "  - parameter 'p0': 4 bytes of float32, here 8 bytes of float32\n"
        "  - parameter 'p1': 8 bytes of float32, here 8 bytes of float32, sparse\n"
        "  - and 1 more"
    )


def test_a_tuned_plan_is_used_only_for_what_it_was_tuned(tmp_path: Path, one_rank_group: None) -> None:
    ddp, other = (DistributedDataParallel(nn.Linear(size, 2)) for size in (3, 4))
    link = replace(LINK, world_size=1)
    gradients = tuple(Gradient(spec, 0.1) for spec in specs_from_ddp(ddp))
    profile = replace(PROFILE, gradients=gradients)
    plan = tune(profile, link)
    file = tmp_path / "tuned.json"

    def differing(model: nn.Module, profile: Profile, link: Link, **options: Any) -> list[str]:
        """In what a file that ``ddpopt tune`` wrote does not fit."""
        records = {type(record).__name__.lower(): json.loads(record.to_json()) for record in (profile, link)}
        file.write_text(json.dumps({**json.loads(plan.to_json()), **records}))
        try:
            ddpopt.compile(model, backend="eager", plan=file, **options)
        except UsageError as error:
            return re.findall("^  - (.*?):", str(error), re.MULTILINE)
        assert imposed_plan(model) == plan
        return []

    gpu = tuple(replace(each, spec=replace(each.spec, device="cuda:0")) for each in gradients)
    assert differing(other, profile, link) == ["parameter 'weight'"]
    assert differing(ddp, replace(profile, measured={"torch": "2.0"}), link) == ["torch"]
    assert differing(ddp, replace(profile, gradients=gpu), link) == ["device"]
    assert differing(ddp, profile, LINK) == ["ranks"]
    assert differing(ddp, profile, link, strategy="split") == ["strategy"]
    assert differing(ddp, profile, link) == []
