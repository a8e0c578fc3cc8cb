"""The text of explanations, and what cannot be explained."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from ddpopt.cases.case import Case
from ddpopt.errors import UsageError
from ddpopt.explanation.explain import explain, explain_case
from ddpopt.explanation.result import Explanation
from ddpopt.planning.plan import Plan
from tests.unit.rehearsing import Linears, explained, params, rows


def text(explanation: Explanation) -> str:
    """The table without what other versions of torch name otherwise."""
    return str(explanation).replace(explanation.plan.fingerprint, "<hash>")


# ------------------------------------------------------------------------------------------- tables


def test_linear8_has_seven_of_nine_buckets_on_two_of_torchs_segments() -> None:
    assert_expected_inline(
        text(explained("linear8")),
        """\
Linears: 16 parameters, 32.031 MiB; buckets close at 4 MiB

                                          ddpopt  torch's DDPOptimizer
----------------------------------------------------------------------
segments                                       8                     8
buckets that DDP reduces                       8                     9
  that wait on more than one segment           0                     7
  that leave before backward ends              7                     7
parameters that it does not see                0                     0
parameters that it counts more than once       0                     0

ddpopt's plan, in the order of reduction; fingerprint <hash>
bucket  segment    MiB  dtype    gradients, and why the bucket ends there
--------------------------------------------------------------------------------
     0        7  4.004  float32  layers.7.bias, layers.7.weight
                                   layers.7.weight brings it to 4198400 bytes,
                                   at or over the limit of 4194304
     1        6  4.004  float32  layers.6.bias, layers.6.weight
                                   layers.6.weight brings it to 4198400 bytes,
                                   at or over the limit of 4194304
     2        5  4.004  float32  layers.5.bias, layers.5.weight
                                   layers.5.weight brings it to 4198400 bytes,
                                   at or over the limit of 4194304
     3        4  4.004  float32  layers.4.bias, layers.4.weight
                                   layers.4.weight brings it to 4198400 bytes,
                                   at or over the limit of 4194304
     4        3  4.004  float32  layers.3.bias, layers.3.weight
                                   layers.3.weight brings it to 4198400 bytes,
                                   at or over the limit of 4194304
     5        2  4.004  float32  layers.2.bias, layers.2.weight
                                   layers.2.weight brings it to 4198400 bytes,
                                   at or over the limit of 4194304
     6        1  4.004  float32  layers.1.bias, layers.1.weight
                                   layers.1.weight brings it to 4198400 bytes,
                                   at or over the limit of 4194304
     7        0  4.004  float32  layers.0.bias, layers.0.weight
                                   layers.0.weight brings it to 4198400 bytes,
                                   at or over the limit of 4194304

ddpopt's segments, in the order of backward
segment  graph  from node  nodes  completes  why it is cut there
------------------------------------------------------------------
      7      0  linear_7       2  0          bucket 0 is complete
      6      0  linear_6       2  1          bucket 1 is complete
      5      0  linear_5       2  2          bucket 2 is complete
      4      0  linear_4       2  3          bucket 3 is complete
      3      0  linear_3       2  4          bucket 4 is complete
      2      0  linear_2       2  5          bucket 5 is complete
      1      0  linear_1       2  6          bucket 6 is complete
      0      0  linear         2  7          the graph starts here

DDP's own buckets in eager training, rebuilt in ready order
bucket    MiB  dtype    gradients
------------------------------------------------------
     0  4.004  float32  layers.7.bias, layers.7.weight
     1  4.004  float32  layers.6.bias, layers.6.weight
     2  4.004  float32  layers.5.bias, layers.5.weight
     3  4.004  float32  layers.4.bias, layers.4.weight
     4  4.004  float32  layers.3.bias, layers.3.weight
     5  4.004  float32  layers.2.bias, layers.2.weight
     6  4.004  float32  layers.1.bias, layers.1.weight
     7  4.004  float32  layers.0.bias, layers.0.weight

torch's DDPOptimizer: its segments, in the order of backward
segment  graph  MiB counted  parameters counted
-----------------------------------------------------------
      7      0        4.004  layers.7.weight, layers.7.bias
      6      0        4.004  layers.6.weight, layers.6.bias
      5      0        4.004  layers.5.weight, layers.5.bias
      4      0        4.004  layers.4.weight, layers.4.bias
      3      0        4.004  layers.3.weight, layers.3.bias
      2      0        4.004  layers.2.weight, layers.2.bias
      1      0        4.004  layers.1.weight, layers.1.bias
      0      0        4.004  layers.0.weight, layers.0.bias

torch's DDPOptimizer: DDP's own buckets under it
bucket  waits on    MiB  dtype    gradients
----------------------------------------------------------------
     0  7         4.000  float32  layers.7.weight
     1  7, 6      4.004  float32  layers.7.bias, layers.6.weight
     2  6, 5      4.004  float32  layers.6.bias, layers.5.weight
     3  5, 4      4.004  float32  layers.5.bias, layers.4.weight
     4  4, 3      4.004  float32  layers.4.bias, layers.3.weight
     5  3, 2      4.004  float32  layers.3.bias, layers.2.weight
     6  2, 1      4.004  float32  layers.2.bias, layers.1.weight
     7  1, 0      4.004  float32  layers.1.bias, layers.0.weight
     8  0         0.004  float32  layers.0.bias""",
    )


def test_keyword_arguments_hide_all_parameters_from_torchs_optimizer() -> None:
    assert_expected_inline(
        text(explained("keyword")),
        """\
KeywordArguments: 16 parameters, 4.512 MiB; buckets close at 1, then 25 MiB

                                          ddpopt  torch's DDPOptimizer
----------------------------------------------------------------------
segments                                       2                     1
buckets that DDP reduces                       2                     2
  that wait on more than one segment           0                     0
  that leave before backward ends              1                     0
parameters that it does not see                0                    16
parameters that it counts more than once       0                     0

ddpopt's plan, in the order of reduction; fingerprint <hash>
bucket  segment    MiB  dtype    gradients, and why the bucket ends there
--------------------------------------------------------------------------------
     0        1  1.128  float32  biases.7, weights.7, biases.6, weights.6
                                   weights.6 brings it to 1182720 bytes, at or
                                   over the limit of 1048576
     1        0  3.384  float32  biases.5, weights.5, ..., weights.0 (12)
                                   no gradient is left to add

ddpopt's segments, in the order of backward
segment  graph  from node  nodes  completes  why it is cut there
------------------------------------------------------------------
      1      0  linear_6       4  0          bucket 0 is complete
      0      0  linear        12  1          the graph starts here

DDP's own buckets in eager training, rebuilt in ready order
bucket    MiB  dtype    gradients
----------------------------------------------------------------
     0  1.128  float32  biases.7, weights.7, biases.6, weights.6
     1  3.384  float32  biases.5, weights.5, ..., weights.0 (12)

torch's DDPOptimizer: its segments, in the order of backward
segment  graph  MiB counted  parameters counted
-----------------------------------------------
      0      0        0.000  -

torch's DDPOptimizer: DDP's own buckets under it
bucket  waits on    MiB  dtype    gradients
--------------------------------------------------------------------------
     0  0         1.125  float32  weights.0, weights.1
     1  0         3.387  float32  weights.3, weights.7, ..., biases.1 (14)

Parameters that it does not see: weights.0, weights.1, ..., biases.7 (16).""",
    )


def test_a_tied_weight_is_counted_twice_by_torchs_optimizer() -> None:
    assert_expected_inline(
        text(explained("tied")),
        """\
Residuals: 15 parameters, 3.949 MiB; buckets close at 1, then 25 MiB

                                          ddpopt  torch's DDPOptimizer
----------------------------------------------------------------------
segments                                       2                     2
buckets that DDP reduces                       2                     2
  that wait on more than one segment           0                     1
  that leave before backward ends              1                     0
parameters that it does not see                0                     0
parameters that it counts more than once       0                     1

ddpopt's plan, in the order of reduction; fingerprint <hash>
bucket  segment    MiB  dtype    gradients, and why the bucket ends there
--------------------------------------------------------------------------------
     0        1  1.129  float32  layers.7.bias, layers.6.bias, ...,
                                 layers.5.weight (5)
                                   layers.5.weight brings it to 1184256 bytes,
                                   at or over the limit of 1048576
     1        0  2.820  float32  layers.4.bias, layers.4.weight, ...,
                                 layers.0.weight (10)
                                   no gradient is left to add

ddpopt's segments, in the order of backward
segment  graph  from node  nodes  completes  why it is cut there
------------------------------------------------------------------
      1      0  linear_5       9  0          bucket 0 is complete
      0      0  linear        15  1          the graph starts here

DDP's own buckets in eager training, rebuilt in ready order
bucket    MiB  dtype    gradients
--------------------------------------------------------------------------------
     0  1.129  float32  layers.7.bias, layers.6.bias, ..., layers.5.weight (5)
     1  2.820  float32  layers.4.bias, layers.4.weight, ..., layers.0.weight
                        (10)

torch's DDPOptimizer: its segments, in the order of backward
segment  graph  MiB counted  parameters counted
--------------------------------------------------------------------------------
      1      0        1.128  layers.0.weight, layers.7.bias, layers.6.weight,
                             layers.6.bias
      0      0        3.384  layers.5.weight, layers.5.bias, ..., layers.0.bias
                             (12)

torch's DDPOptimizer: DDP's own buckets under it
bucket  waits on    MiB  dtype    gradients
--------------------------------------------------------------------------------
     0  1, 0      1.128  float32  layers.6.weight, layers.6.bias, layers.7.bias,
                                  layers.0.weight
     1  0         2.821  float32  layers.1.weight, layers.3.weight, ...,
                                  layers.1.bias (11)

Parameters that it counts more than once: layers.0.weight.""",
    )


def test_mixed_dtypes_stand_in_buckets_of_their_own() -> None:
    assert_expected_inline(
        text(explained("mixed_dtypes")),
        """\
MixedDtypes: 20 parameters, 4.230 MiB; buckets close at 1, then 25 MiB

                                          ddpopt  torch's DDPOptimizer
----------------------------------------------------------------------
segments                                       3                     2
buckets that DDP reduces                       5                     4
  that wait on more than one segment           0                     2
  that leave before backward ends              4                     0
parameters that it does not see                0                     0
parameters that it counts more than once       0                     0

ddpopt's plan, in the order of reduction; fingerprint <hash>
bucket  segment    MiB  dtype     gradients, and why the bucket ends there
--------------------------------------------------------------------------------
     0        2  1.128  float32   layers.8.bias, layers.8.weight, layers.6.bias,
                                  layers.6.weight
                                    layers.6.weight brings it to 1182720 bytes,
                                    at or over the limit of 1048576
     1        2  0.564  bfloat16  layers.9.bias, layers.9.weight, layers.7.bias,
                                  layers.7.weight
                                    another bucket ends at this cut, and none
                                    waits on two segments
     2        1  0.846  bfloat16  layers.5.bias, layers.5.weight, ...,
                                  layers.1.weight (6)
                                    no gradient is left to add
     3        1  1.128  float32   layers.4.bias, layers.4.weight, layers.2.bias,
                                  layers.2.weight
                                    another bucket ends at this cut, and none
                                    waits on two segments
     4        0  0.564  float32   layers.0.bias, layers.0.weight
                                    no gradient is left to add

ddpopt's segments, in the order of backward
segment  graph  from node  nodes  completes  why it is cut there
------------------------------------------------------------------
      2      0  linear_6      15  0, 1       bucket 0 is complete
      1      0  linear_1      20  2, 3       bucket 2 is complete
      0      0  to             5  4          the graph starts here

DDP's own buckets in eager training, rebuilt in ready order
bucket    MiB  dtype     gradients
--------------------------------------------------------------------------------
     0  1.128  float32   layers.8.bias, layers.8.weight, layers.6.bias,
                         layers.6.weight
     1  1.128  bfloat16  layers.9.bias, layers.9.weight, ..., layers.3.weight
                         (8)
     2  1.692  float32   layers.4.bias, layers.4.weight, ..., layers.0.weight
                         (6)
     3  0.282  bfloat16  layers.1.bias, layers.1.weight

torch's DDPOptimizer: its segments, in the order of backward
segment  graph  MiB counted  parameters counted
--------------------------------------------------------------------------------
      1      0        1.128  layers.9.weight, layers.9.bias, ..., layers.7.bias
                             (6)
      0      0        3.102  layers.6.weight, layers.6.bias, ..., layers.0.bias
                             (14)

torch's DDPOptimizer: DDP's own buckets under it
bucket  waits on    MiB  dtype     gradients
--------------------------------------------------------------------------------
     0  1, 0      1.126  float32   layers.8.weight, layers.8.bias,
                                   layers.0.weight
     1  1, 0      1.126  bfloat16  layers.7.weight, layers.9.weight, ...,
                                   layers.3.weight (6)
     2  0         1.693  float32   layers.6.bias, layers.6.weight, ...,
                                   layers.0.bias (7)
     3  0         0.283  bfloat16  layers.5.bias, layers.5.weight,
                                   layers.3.bias, layers.1.bias""",
    )


def test_a_cap_below_one_mib_crashes_torchs_optimizer_and_the_rest_is_shown() -> None:
    assert_expected_inline(
        text(explain(Linears(), rows(), strategy="split", bucket_cap_mb=0.06)),
        """\
Linears: 6 parameters, 0.189 MiB; buckets close at 0.06 MiB

                                          ddpopt  torch's DDPOptimizer
----------------------------------------------------------------------
segments                                       3                     -
buckets that DDP reduces                       3                     -
  that wait on more than one segment           0                     -
  that leave before backward ends              2                     -
parameters that it does not see                0                     -
parameters that it counts more than once       0                     -
torch's DDPOptimizer crashes: AssertionError: First bucket should be
  smaller/equal to other buckets to get comms warmed up ASAP

ddpopt's plan, in the order of reduction; fingerprint <hash>
bucket  segment    MiB  dtype    gradients, and why the bucket ends there
--------------------------------------------------------------------------------
     0        2  0.063  float32  layers.2.bias, layers.2.weight
                                   layers.2.weight brings it to 66048 bytes, at
                                   or over the limit of 62914
     1        1  0.063  float32  layers.1.bias, layers.1.weight
                                   layers.1.weight brings it to 66048 bytes, at
                                   or over the limit of 62914
     2        0  0.063  float32  layers.0.bias, layers.0.weight
                                   layers.0.weight brings it to 66048 bytes, at
                                   or over the limit of 62914

ddpopt's segments, in the order of backward
segment  graph  from node  nodes  completes  why it is cut there
------------------------------------------------------------------
      2      0  linear_2       2  0          bucket 0 is complete
      1      0  linear_1       2  1          bucket 1 is complete
      0      0  linear         2  2          the graph starts here

DDP's own buckets in eager training, rebuilt in ready order
bucket    MiB  dtype    gradients
------------------------------------------------------
     0  0.063  float32  layers.2.bias, layers.2.weight
     1  0.063  float32  layers.1.bias, layers.1.weight
     2  0.063  float32  layers.0.bias, layers.0.weight""",
    )


def test_a_bare_sequential_is_not_compiled_by_torch() -> None:
    assert_expected_inline(
        text(explained("sequential")),
        """\
Sequential: 16 parameters, 4.512 MiB; buckets close at 1, then 25 MiB

                                          ddpopt  torch's DDPOptimizer
----------------------------------------------------------------------
segments                                       2                     0
buckets that DDP reduces                       2                     2
  that wait on more than one segment           0                     -
  that leave before backward ends              1                     -
parameters that it does not see                0                     -
parameters that it counts more than once       0                     -

ddpopt's plan, in the order of reduction; fingerprint <hash>
bucket  segment    MiB  dtype    gradients, and why the bucket ends there
--------------------------------------------------------------------------------
     0        1  1.128  float32  14.bias, 14.weight, 12.bias, 12.weight
                                   12.weight brings it to 1182720 bytes, at or
                                   over the limit of 1048576
     1        0  3.384  float32  10.bias, 10.weight, ..., 0.weight (12)
                                   no gradient is left to add

ddpopt's segments, in the order of backward
segment  graph  from node  nodes  completes  why it is cut there
------------------------------------------------------------------
      1      0  input_13       4  0          bucket 0 is complete
      0      0  input_1       12  1          the graph starts here

DDP's own buckets in eager training, rebuilt in ready order
bucket    MiB  dtype    gradients
--------------------------------------------------------------
     0  1.128  float32  14.bias, 14.weight, 12.bias, 12.weight
     1  3.384  float32  10.bias, 10.weight, ..., 0.weight (12)

torch's DDPOptimizer: torch.compile compiles nothing of it under DDP: Dynamo
  steps over its frames (pytorch#140416)""",
    )


def test_a_graph_break_gives_each_graph_segments_of_its_own() -> None:
    assert_expected_inline(
        text(explained("graph_break")),
        """\
OwnBreak: 24 parameters, 4.706 MiB; buckets close at 1, then 25 MiB

                                          ddpopt  torch's DDPOptimizer
----------------------------------------------------------------------
segments                                       2                     6
buckets that DDP reduces                       3                     2
  that wait on more than one segment           0                     2
  that leave before backward ends              2                     1
parameters that it does not see               16                    16
parameters that it counts more than once       0                     0

ddpopt's plan, in the order of reduction; fingerprint <hash>
bucket  segment    MiB  dtype    gradients, and why the bucket ends there
--------------------------------------------------------------------------------
     0        1  3.137  float32  blocks.5.down.bias, blocks.5.down.weight, ...,
                                 blocks.2.up.weight (16)
                                   no compiled graph reads these parameters;
                                   they are placed by their order of
                                   registration
     1        1  0.784  float32  blocks.1.down.bias, blocks.1.down.weight,
                                 blocks.1.up.bias, blocks.1.up.weight
                                   no gradient is left to add
     2        0  0.784  float32  blocks.0.down.bias, blocks.0.down.weight,
                                 blocks.0.up.bias, blocks.0.up.weight
                                   no gradient is left to add

ddpopt's segments, in the order of backward
segment  graph  from node  nodes  completes  why it is cut there
------------------------------------------------------------------
      1      1  linear         3  0, 1       the graph starts here
      0      0  linear         3  2          the graph starts here

No compiled graph reads blocks.2.up.weight, blocks.2.up.bias, ...,
  blocks.5.down.bias (16).

DDP's own buckets in eager training, rebuilt in ready order
bucket    MiB  dtype    gradients
--------------------------------------------------------------------------------
     0  1.176  float32  blocks.5.down.bias, blocks.5.down.weight, ...,
                        blocks.4.down.weight (6)
     1  3.530  float32  blocks.4.up.bias, blocks.4.up.weight, ...,
                        blocks.0.up.weight (18)

torch's DDPOptimizer: its segments, in the order of backward
segment  graph  MiB counted  parameters counted
--------------------------------------------------------------------------------
      5      1        0.784  as before: the same code
      4      1        0.784  as before: the same code
      3      1        0.784  as before: the same code
      2      1        0.784  as before: the same code
      1      1        0.784  blocks.1.down.weight, blocks.1.down.bias,
                             blocks.1.up.weight, blocks.1.up.bias
      0      0        0.784  blocks.0.down.weight, blocks.0.down.bias,
                             blocks.0.up.weight, blocks.0.up.bias

torch's DDPOptimizer: DDP's own buckets under it
bucket  waits on            MiB  dtype    gradients
--------------------------------------------------------------------------------
     0  5, 4              1.175  float32  blocks.5.up.weight, blocks.5.up.bias,
                                          ..., blocks.4.up.weight (5)
     1  4, 3, ..., 0 (5)  3.531  float32  blocks.4.up.bias,
                                          blocks.4.down.weight, ...,
                                          blocks.0.down.bias (19)

Parameters that it does not see: blocks.2.up.weight, blocks.2.up.bias, ...,
  blocks.5.down.bias (16).""",
    )


def test_remarks_follow_the_tables() -> None:
    tail = str(explained("ignored")).splitlines()[-2:]
    assert_expected_inline(
        "\n".join(tail),
        """\
Parameters that it counts although DDP does not reduce them: layers.5.weight,
  layers.5.bias, layers.2.weight, layers.2.bias.""",
    )
    tail = str(explained("stochastic_depth")).splitlines()[-3:]
    assert_expected_inline(
        "\n".join(tail),
        """\
torch's DDPOptimizer: a float crosses its cuts: backends built on AOTAutograd
  (inductor, aot_eager) fail there with "'float' object has no attribute 'meta'"
  (pytorch#196227)""",
    )


def test_buckets_that_ddp_never_rebuilds_are_its_initial_ones() -> None:
    explanation = explained("unused")
    assert "DDP's own buckets in eager training, which it never rebuilds\n" in str(explanation)
    assert [bucket.params[0] for bucket in explanation.ddp.buckets] == ["layers.1.bias", "layers.0.weight"]
    assert explanation.torch.unseen == ("layers.2.weight", "layers.2.bias")
    assert (explanation.plan_tally.unseen, explanation.torch_tally.unseen) == (2, 2)


def test_no_line_is_longer_than_80_columns_or_ends_in_a_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = explained("mixed_dtypes")
    plain = str(explanation)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(explanation) == plain
    assert max(map(len, plain.splitlines())) <= 80
    assert not re.search(r"\x1b|[ \t]$", plain, re.MULTILINE)


def test_json_holds_the_plan_and_all_else_that_is_shown() -> None:
    explanation = explained("linear8")
    document = json.loads(explanation.to_json())
    assert Plan.from_json(json.dumps(document["plan"])) == explanation.plan
    assert document["model"] == "Linears"
    assert document["config"]["cap_bytes"] == 4 * 2**20
    assert document["summary"] == {
        "ddpopt": asdict(explanation.plan_tally),
        "torch": asdict(explanation.torch_tally),
    }
    assert [tuple(b["params"]) for b in document["ddp"]["buckets"]] == params(explanation.ddp.buckets)
    assert [b["segments"] for b in document["torch"]["buckets"]][:2] == [[7], [6, 7]]


def test_a_model_that_is_none_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as caught:
        explain(torch.relu, rows())  # type: ignore[arg-type]  # the mistake under test
    assert_expected_inline(
        str(caught.value).partition(" at 0x")[0],
        """model: expected a torch.nn.Module, got <built-in method relu of type object""",
    )


def test_a_model_that_does_not_run_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as caught:
        explain(Linears(), rows(7))
    assert str(caught.value).startswith("model: Linears could not be traced on fake tensors: ")
    assert caught.value.exit_code == 2


def test_a_case_that_draws_its_weights_leaves_the_callers_generator_alone() -> None:
    drawn = Case("drawn", lambda: nn.Linear(2, 2), lambda rank, step: ((torch.randn(1, 2),), {}), "draws")
    before = torch.random.get_rng_state()
    explain_case(drawn, {})
    assert torch.equal(torch.random.get_rng_state(), before)
