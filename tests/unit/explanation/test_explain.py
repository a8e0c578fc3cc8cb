"""The text of explanations, and what cannot be explained."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.cases.corpus.parameters import MixedDtypes
from ddpopt.ddp.specs import specs_from_module
from ddpopt.explanation.explain import explain, explain_case
from ddpopt.explanation.result import Tally
from ddpopt.planning.plan import Plan
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import plan_of
from tests.support.refusals import refusal
from tests.support.rehearsing import Linears, explained, params, rows

TWO = Tally(2, 2, 0, 1, 0, 0)
SPLITS: dict[str, tuple[Tally, Tally, str]] = {
    # seven of torch's nine buckets wait on two of its segments; all is as usual: the last table is the end
    "linear8": (Tally(8, 8, 0, 7, 0, 0), Tally(8, 9, 7, 7, 0, 0), " layers.0.bias"),
    "keyword": (
        TWO, Tally(1, 2, 0, 0, 16, 0),
        "Parameters that it does not see: weights.0, weights.1, ..., biases.7 (16).",
    ),
    "tied": (TWO, Tally(2, 2, 1, 0, 0, 1), "Parameters that it counts more than once: layers.0.weight."),
    "graph_break": (
        Tally(2, 3, 0, 2, 16, 0), Tally(6, 2, 2, 1, 16, 0),
        "does not see: blocks.2.up.weight, blocks.2.up.bias, ..., blocks.5.down.bias (16).",
    ),
    "sequential": (
        TWO, Tally(0, 2, None, None, None, None),
        "torch.compile compiles none of it under DDP: Dynamo skips its frames (pytorch#140416)",
    ),
    "ignored": (
        TWO, TWO,
        "Parameters that it counts although DDP does not reduce them: layers.5.weight, layers.5.bias, "
        "layers.2.weight, layers.2.bias.",
    ),
    "stochastic_depth": (
        Tally(4, 6, 0, 5, 4, 0), Tally(6, 7, 5, 5, 4, 0),
        "a float crosses its cuts: backends built on AOTAutograd (inductor, aot_eager) fail there with "
        "\"'float' object has no attribute 'meta'\" (pytorch#196227)",
    ),
}  # fmt: skip
"""What is counted of ours and of torch's, and what is said last."""


@pytest.mark.parametrize("case", SPLITS)
def test_both_splits_are_counted_and_what_is_unusual_about_torchs_is_reported_last(case: str) -> None:
    ours, torchs, remark = SPLITS[case]
    assert (explained(case).plan_tally, explained(case).torch_tally) == (ours, torchs)
    assert " ".join(str(explained(case)).split()).endswith(remark)


def test_each_dtype_has_its_own_buckets() -> None:
    explanation = explain(MixedDtypes(384, 5), rows(384), strategy="split")
    *parts, _, segments, buckets = str(explanation).split("\n\n")  # DDP's own buckets look alike twice
    assert_expected_inline(  # the fingerprint is another one with other versions of torch
        "\n\n".join([*parts, segments, buckets]).replace(explanation.plan.fingerprint, "<hash>"),
        """\
MixedDtypes: 10 parameters, 2.256 MiB; buckets close at 1, then 25 MiB

                                          ddpopt  torch's DDPOptimizer
----------------------------------------------------------------------
segments                                       3                     2
buckets that DDP reduces                       4                     3
  that wait on more than one segment           0                     2
  that leave before backward ends              3                     1
parameters that it does not see                0                     0
parameters that it counts more than once       0                     0

ddpopt's plan, in the order of reduction; fingerprint <hash>
bucket  segment    MiB  dtype     gradients, and why the bucket ends there
--------------------------------------------------------------------------------
     0        2  1.128  float32   layers.4.bias, layers.4.weight, layers.2.bias,
                                  layers.2.weight
                                    layers.2.weight brings it to 1182720 bytes,
                                    at or over the limit of 1048576
     1        2  0.282  bfloat16  layers.3.bias, layers.3.weight
                                    another bucket ends at this cut; none may
                                    wait on two segments
     2        1  0.282  bfloat16  layers.1.bias, layers.1.weight
                                    no gradient is left to add
     3        0  0.564  float32   layers.0.bias, layers.0.weight
                                    no gradient is left to add

ddpopt's segments, in the order of backward
segment  graph  from node  nodes  completes  why it is cut there
------------------------------------------------------------------
      2      0  linear_2      11  0, 1       bucket 0 is complete
      1      0  linear_1       4  2          bucket 2 is complete
      0      0  to             5  3          the graph starts here

torch's DDPOptimizer: its segments, in the order of backward
segment  graph  MiB counted  parameters counted
--------------------------------------------------------------------------------
      1      0        1.410  layers.4.weight, layers.4.bias, ..., layers.2.bias
                             (6)
      0      0        0.846  layers.1.weight, layers.1.bias, layers.0.weight,
                             layers.0.bias

torch's DDPOptimizer: DDP's own buckets under it
bucket  waits on    MiB  dtype     gradients
--------------------------------------------------------------------------------
     0  1         1.125  float32   layers.2.weight, layers.4.weight
     1  1, 0      0.564  bfloat16  layers.3.weight, layers.3.bias,
                                   layers.1.weight, layers.1.bias
     2  1, 0      0.567  float32   layers.4.bias, layers.2.bias,
                                   layers.0.weight, layers.0.bias""",
    )


def test_a_cap_below_one_mib_crashes_torchs_optimizer_and_the_rest_is_shown() -> None:
    explanation = explain(Linears(), rows(), strategy="split", bucket_cap_mb=0.06)
    _, tally, plan, segments, own = str(explanation).split("\n\n")
    assert tally.endswith(
        """
parameters that it counts more than once       0                     -
torch's DDPOptimizer crashes: AssertionError: First bucket should be
  smaller/equal to other buckets to get comms warmed up ASAP"""
    )
    starts = ("ddpopt's plan", "ddpopt's segments", "DDP's own buckets in eager training, rebuilt in ready")
    assert all(map(str.startswith, (plan, segments, own), starts))


def test_buckets_that_ddp_never_rebuilds_are_its_initial_ones() -> None:
    explanation = explained("unused")
    assert "DDP's own buckets in eager training, which it never rebuilds\n" in str(explanation)
    assert [bucket.params[0] for bucket in explanation.ddp.buckets] == ["layers.1.bias", "layers.0.weight"]
    assert explanation.torch.unseen == ("layers.2.weight", "layers.2.bias")
    assert (explanation.plan_tally.unseen, explanation.torch_tally.unseen) == (2, 2)


def test_json_holds_the_plan_and_all_else_that_is_shown() -> None:
    explanation = explained("linear8")
    document = json.loads(explanation.to_json())
    assert Plan.from_json(json.dumps(document["plan"])) == explanation.plan
    assert document["model"] == "Linears"
    assert document["config"]["cap_bytes"] == 4 * 2**20
    ours, torchs = asdict(explanation.plan_tally), asdict(explanation.torch_tally)
    assert document["summary"] == {"ddpopt": ours, "torch": torchs}
    assert [tuple(b["params"]) for b in document["ddp"]["buckets"]] == params(explanation.ddp.buckets)
    assert [b["segments"] for b in document["torch"]["buckets"]][:2] == [[7], [6, 7]]


def test_a_profile_adds_the_step_that_it_predicts(tmp_path: Path) -> None:
    explanation, link = explained("keyword"), Link(0.001, 1e-8, 0.0, 1.0, 0.0, "gloo", 2, {})
    specs = {spec.name: spec for spec in specs_from_module(corpus.case("keyword").model())}
    order = [specs[name] for bucket in explanation.plan.buckets for name in bucket.params]
    ready = tuple(Gradient(spec, 0.02 * place) for place, spec in enumerate(order))
    profile = Profile(ready, 0.1, 0.3, 0.05, "inline", 2, {"torch": torch.__version__})
    plan = plan_of([order], "tuned")
    tuned = {**json.loads(plan.to_json()), "profile": json.loads(profile.to_json())}
    for record in (profile, link):
        (tmp_path / type(record).__name__).write_text(record.to_json())
    (tmp_path / "both").write_text(json.dumps(tuned))
    shown = explanation.predicted(str(tmp_path / "both"), str(tmp_path / "Link"))
    assert_expected_inline(
        str(shown).removeprefix(f"{explanation}\n\n"),
        """\
explained: 485.5 ms, 35.5 ms exposed
compute  ffffffffffbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb....uuuuuu
network                  00                      #####
tuned: 497.3 ms, 47.3 ms exposed
compute  ffffffffffbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb.....uuuuuu
network                                          ######
f forward, b backward, . waiting, u update; # exposed;
the last digit of a bucket: sent while backward computes""",
    )
    steps = json.loads(shown.to_json())["timelines"]
    for name, of in {"explained": shown.plan, "tuned": plan}.items():
        assert steps[name]["step_s"] == simulate(of, profile, link).step_s
    records = str(tmp_path / "Profile"), str(tmp_path / "Link")
    alone = explanation.predicted(*records)
    assert [*alone.timelines] == ["explained"]
    assert refusal(lambda: explanation.predicted("absent")).startswith("--profile: cannot read 'absent'")
    (tmp_path / "Profile").write_text(replace(profile, gradients=ready[1:]).to_json())
    assert "of different models" in refusal(lambda: explanation.predicted(*records))


def test_a_case_that_draws_its_weights_leaves_the_callers_generator_alone() -> None:
    drawn = Case("drawn", lambda: nn.Linear(2, 2), lambda rank, step: ((torch.randn(1, 2),), {}), "draws")
    before = torch.random.get_rng_state()
    explain_case(drawn, {})
    assert torch.equal(torch.random.get_rng_state(), before)
