"""What was measured, as JSON: read back equal, or refused with what is wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.errors import PlanMismatchError, UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.stored import Stored
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import plan_of, tune
from tests.support.refusals import refusal

GRADIENT = Gradient(ParamSpec("p", 4, "float32", "cpu"), 0.1)
PROFILE = Profile((GRADIENT,), 1.0, 2.0, 3.0, "inline", 2, {"torch": str(torch.__version__)})
LINK = Link(1e-4, 1e-9, 0.0, 1.0, 0.05, "gloo", 2, {})


@pytest.mark.parametrize("stored", [PROFILE, LINK])
def test_what_was_stored_is_read_back_equal_and_nothing_else_is_read(stored: Stored) -> None:
    kind, text = type(stored).__name__.lower(), stored.to_json()
    assert type(stored).from_json(text) == stored
    wrong = {
        "{": f"expected a {kind} that ddpopt wrote, got something else: JSONDecodeError: Expecting",
        "[]": f"expected a {kind} that ddpopt wrote, got something else: AttributeError: 'list'",
        text.replace("world_size", "ranks"): "argument: 'world_size'. Make it again",
        text.replace(f'"ddpopt_{kind}": 2', f'"ddpopt_{kind}": 1'): (
            "ValueError: format 1, which another version wrote; this one has 2. Make it again"
        ),
        text.replace('"ready_s"', '"at"').replace('"backend": "gloo"', '"x": 1'): ". Make it again",
        text.replace('"world_size": 2', '"world_size": -1'): "ValueError: expected a number, got -1. Make",
        text.replace("0.1", "NaN").replace('"busy": 1.0', '"busy": 0.5'): "ValueError: ",
        "[" * 100_000: "RecursionError",
    }
    for given, said in wrong.items():
        with pytest.raises(UsageError) as caught:
            type(stored).from_json(given, "--link a.json: ")
        assert str(caught.value).startswith(f"--link a.json: expected a {kind}")
        assert said in str(caught.value)
    with pytest.raises(UsageError, match="different models: 1 parameters differ, such as 'p'; make both"):
        simulate(plan_of([[replace(GRADIENT.spec, nbytes=8)]], ""), PROFILE, LINK)


@pytest.mark.usefixtures("one_rank_group")
def test_a_tuned_plan_is_used_only_where_it_fits_and_the_error_has_each_difference(tmp_path: Path) -> None:
    ddp, link, file = DistributedDataParallel(nn.Linear(3, 2)), replace(LINK, world_size=1), tmp_path / "a"
    weight, bias = (Gradient(spec, 0.1) for spec in specs_from_ddp(ddp))

    def compiled(link: Link, **changed: Any) -> None:
        profile = replace(PROFILE, gradients=(weight, bias), **changed)
        records = {type(record).__name__.lower(): json.loads(record.to_json()) for record in (profile, link)}
        file.write_text(json.dumps({**json.loads(tune(profile, link).to_json()), **records}))
        ddpopt.compile(ddp, backend="eager", plan=file)

    compiled(link)
    assert imposed_plan(ddp) == tune(replace(PROFILE, gradients=(weight, bias)), link)
    weight = replace(weight, spec=ParamSpec("weight", 8, "bfloat16", "cuda:1"))
    assert refusal(lambda: compiled(LINK, measured={"torch": "2.0+cpu"}, strategy="eager")) == (
        f"plan {file}: measured for something else:\n"
        f"  - torch: 2.0, here {torch.__version__.partition('+')[0]}\n"
        "  - device: cuda, here cpu\n"
        "  - strategy: eager, here inline\n"
        "  - ranks: 2, here 1\n"
        "Measure it again."
    )
    weight = replace(weight, spec=replace(weight.spec, device="cpu"))
    with pytest.raises(PlanMismatchError, match="planned as 8 bytes of bfloat16, but its parameters are 24 "):
        compiled(link)
