"""The plan of every case of the corpus at a cap of 1 MiB (or the case's own), as it is today.

For each bucket: the segment that completes it, its size and its parameters; for each cut, its graph and the
node that opens the later segment. A plan that changes shows here, and whoever changes it says why.
"""

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from expecttest import assert_expected_inline

from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.cases.corpus import (
    arguments,
    control,
    dataflow,
    ddp_rows,
    decoders,
    encoders,
    experts,
    parameters,
    recurrent,
    reports_graphs,
    reports_shapes,
    reports_wrapping,
    scalars,
    sharing,
    sparse,
    vision,
)
from ddpopt.planning.capture import capture
from ddpopt.planning.plan import Bucket, Plan

# What Dynamo warns of in some cases' own code, as in test_corpus_cases.py.
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]


def plans_of(family: ModuleType) -> str:
    """The plans of a family's cases as text."""
    texts = []
    for case in family.CASES:
        torch._dynamo.reset()
        texts.append(f"{case.name}: {as_text(plan_of(case))}")
    return "\n\n".join(texts)


def plan_of(case: Case) -> Plan:
    """The plan of a case, after a look at how many graphs Dynamo makes of it."""
    args, kwargs = case.inputs(0, 0)
    captured = capture(case.model(), *args, **kwargs, **{"bucket_cap_mb": 1, **case.ddp_kwargs})
    assert (case.name, len(captured.graphs)) == (case.name, case.graphs)
    return captured.plan()


def as_text(plan: Plan) -> str:
    lines = [
        f"{len(plan.buckets)} buckets in {len(plan.segments)} segments",
        *map(bucket_as_text, plan.buckets),
    ]
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


def test_each_family_of_the_corpus_has_its_snapshot() -> None:
    shown = [name.removeprefix("test_plans_of_") for name in globals() if name.startswith("test_plans_of_")]
    families = [name for name, value in vars(corpus).items() if hasattr(value, "CASES")]
    assert sorted(shown) == sorted(families)


def test_plans_of_decoders() -> None:
    assert_expected_inline(
        plans_of(decoders),
        """\
gpt: 4 buckets in 4 segments
  0 <- 3: 1032.0 KiB, norm.weight .. 14 .. blocks.2.feed_forward.down.weight
  1 <- 2: 1032.5 KiB, blocks.2.feed_forward.up.bias .. 12 .. blocks.1.feed_forward.up.weight
  2 <- 1: 1033.5 KiB, blocks.1.norm_2.weight .. 16 .. blocks.0.attention.qkv.weight
  3 <- 0: 529.0 KiB, blocks.0.norm_1.weight blocks.0.norm_1.bias positions.weight embedding.weight
  cut 0: linear
  cut 0: linear_6
  cut 0: y_2

llama: 3 buckets in 3 segments
  0 <- 2: 1121.5 KiB, head.weight .. 10 .. blocks.2.down.weight
  1 <- 1: 1041.0 KiB, blocks.2.up.weight .. 9 .. blocks.1.gate.weight
  2 <- 0: 1106.0 KiB, blocks.1.ffn_norm.weight .. 14 .. embedding.weight
  cut 0: linear_11
  cut 0: linear_20""",
    )


def test_plans_of_encoders() -> None:
    assert_expected_inline(
        plans_of(encoders),
        """\
bert: 4 buckets in 4 segments
  0 <- 3: 1099.5 KiB, head_bias .. 19 .. blocks.2.feed_forward.down.weight
  1 <- 2: 1032.5 KiB, blocks.2.feed_forward.up.bias .. 12 .. blocks.1.feed_forward.up.weight
  2 <- 1: 1033.5 KiB, blocks.1.norm_1.weight .. 16 .. blocks.0.attention.qkv.weight
  3 <- 0: 274.0 KiB, norm.weight norm.bias kinds.weight positions.weight words.weight
  cut 0: linear
  cut 0: linear_6
  cut 0: y_2

t5: 4 buckets in 4 segments
  0 <- 3: 1182.1 KiB, decoder_norm.weight .. 18 .. decoder.1.feed_forward.up.weight
  1 <- 2: 1033.4 KiB, decoder.1.norm_3.weight .. 20 .. decoder.0.attention.out.weight
  2 <- 1: 1133.1 KiB, decoder.0.attention.value.weight .. 17 .. encoder.1.feed_forward.up.weight
  3 <- 0: 1012.7 KiB, encoder.1.norm_3.weight .. 16 .. shared.weight
  cut 0: linear_10
  cut 0: out_6
  cut 0: linear_36""",
    )


def test_plans_of_vision() -> None:
    assert_expected_inline(
        plans_of(vision),
        """\
resnet: 3 buckets in 3 segments
  0 <- 2: 1808.8 KiB, head.bias .. 6 .. blocks.5.conv_1.weight
  1 <- 1: 1262.5 KiB, blocks.4.norm_2.weight .. 4 .. blocks.4.conv_1.weight
  2 <- 0: 704.4 KiB, blocks.4.downsample.1.weight .. 31 .. stem.0.weight
  cut 0: conv2d_11
  cut 0: conv2d_13

vit: 4 buckets in 4 segments
  0 <- 3: 1037.0 KiB, head.bias .. 16 .. blocks.3.feed_forward.down.weight
  1 <- 2: 1032.5 KiB, blocks.3.feed_forward.up.bias .. 12 .. blocks.2.feed_forward.up.weight
  2 <- 1: 1033.5 KiB, blocks.2.norm_2.weight .. 16 .. blocks.1.attention.qkv.weight
  3 <- 0: 809.0 KiB, blocks.1.norm_1.weight .. 16 .. patches.weight
  cut 0: linear_4
  cut 0: linear_10
  cut 0: y_3""",
    )


def test_plans_of_recurrent() -> None:
    assert_expected_inline(
        plans_of(recurrent),
        """\
rnn_cell: 4 buckets in 4 segments
  0 <- 3: 1026.0 KiB, head.bias head.weight
  1 <- 2: 1026.0 KiB, cell.bias_ih cell.weight_ih
  2 <- 1: 1026.0 KiB, cell.bias_hh cell.weight_hh
  3 <- 0: 1026.0 KiB, inputs.bias inputs.weight
  cut 0: t
  cut 0: t_1
  cut 0: out

lstm_cell: 3 buckets in 3 segments
  0 <- 2: 1129.7 KiB, head.bias head.weight upper.bias_ih upper.weight_ih
  1 <- 1: 1807.5 KiB, upper.bias_hh upper.weight_hh lower.bias_ih lower.weight_ih
  2 <- 0: 903.8 KiB, lower.bias_hh lower.weight_hh
  cut 0: t_1
  cut 0: t_3""",
    )


def test_plans_of_experts() -> None:
    assert_expected_inline(
        plans_of(experts),
        """\
experts: 4 buckets in 4 segments
  0 <- 3: 1152.0 KiB, layers.2.down layers.2.up
  1 <- 2: 1156.0 KiB, layers.2.router.weight .. 3 .. layers.1.up
  2 <- 1: 1156.0 KiB, layers.1.router.weight .. 3 .. layers.0.up
  3 <- 0: 4.0 KiB, layers.0.router.weight layers.0.norm.weight layers.0.norm.bias
  cut 0: einsum
  cut 0: einsum_2
  cut 0: einsum_4

experts_per_rank: 5 buckets in 3 segments
  0 <- 2: 129.5 KiB, layers.2.experts.3.up.bias .. 1 .. layers.2.experts.3.down.bias
  1 <- 2: 1033.0 KiB, layers.1.experts.3.up.bias .. 17 .. layers.2.experts.3.up.weight
  2 <- 1: 1033.0 KiB, layers.0.experts.3.up.bias .. 17 .. layers.1.experts.3.up.weight
  3 <- 1: 64.5 KiB, mixers.2.weight mixers.2.bias
  4 <- 0: 1032.5 KiB, mixers.0.weight .. 18 .. layers.0.experts.3.up.weight
  cut 0: y_4
  cut 0: y_8
  unread: layers.0.experts.3.up.weight .. 10 .. layers.2.experts.3.down.bias""",
    )


def test_plans_of_sparse() -> None:
    assert_expected_inline(
        plans_of(sparse),
        """\
recommender: 6 buckets in 5 segments
  0 <- 4: 2310.0 KiB, tower.4.bias tower.4.weight tower.2.bias tower.2.weight
  1 <- 3: 250.0 KiB, tables.2.weight
  2 <- 3: 243.0 KiB, tower.0.bias tower.0.weight
  3 <- 2: 250.0 KiB, tables.1.weight
  4 <- 1: 250.0 KiB, tables.0.weight
  5 <- 0: 387.2 KiB, dense.2.bias dense.2.weight dense.0.bias dense.0.weight
  cut 0: embedding_bag
  cut 0: embedding_bag_1
  cut 0: embedding_bag_2
  cut 0: input_6""",
    )


def test_plans_of_arguments() -> None:
    assert_expected_inline(
        plans_of(arguments),
        """\
keyword: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, biases.7 weights.7 biases.6 weights.6
  1 <- 2: 1155.0 KiB, biases.5 weights.5 biases.4 weights.4
  2 <- 1: 1155.0 KiB, biases.3 weights.3 biases.2 weights.2
  3 <- 0: 1155.0 KiB, biases.1 weights.1 biases.0 weights.0
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6

list: 5 buckets in 5 segments
  0 <- 4: 1152.0 KiB, weights.7 weights.6
  1 <- 3: 1152.0 KiB, weights.5 weights.4
  2 <- 2: 1152.0 KiB, weights.3 weights.2
  3 <- 1: 1152.0 KiB, weights.1 weights.0
  4 <- 0: 12.0 KiB, biases.0 biases.1 biases.2 biases.3 biases.4 biases.5 biases.6 biases.7
  cut 0: mm
  cut 0: einsum
  cut 0: mm_2
  cut 0: einsum_1

dict: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, biases.7 weights.7 biases.6 weights.6
  1 <- 2: 1155.0 KiB, biases.5 weights.5 biases.4 weights.4
  2 <- 1: 1155.0 KiB, biases.3 weights.3 biases.2 weights.2
  3 <- 0: 1155.0 KiB, biases.1 weights.1 biases.0 weights.0
  cut 0: y_2
  cut 0: y_4
  cut 0: y_6

methods: 4 buckets in 4 segments
  0 <- 3: 1156.5 KiB, biases.7 biases.6 biases.5 weights.7 weights.6
  1 <- 2: 1153.5 KiB, biases.4 weights.5 weights.4
  2 <- 1: 1156.5 KiB, biases.3 biases.2 biases.1 weights.3 weights.2
  3 <- 0: 1153.5 KiB, biases.0 weights.1 weights.0
  cut 0: getitem
  cut 0: matmul_2
  cut 0: getitem_2""",
    )


def test_plans_of_parameters() -> None:
    assert_expected_inline(
        plans_of(parameters),
        """\
mixed_dtypes: 6 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.8.bias layers.8.weight layers.6.bias layers.6.weight
  1 <- 3: 577.5 KiB bfloat16, layers.9.bias layers.9.weight layers.7.bias layers.7.weight
  2 <- 2: 1155.0 KiB, layers.4.bias layers.4.weight layers.2.bias layers.2.weight
  3 <- 2: 577.5 KiB bfloat16, layers.5.bias layers.5.weight layers.3.bias layers.3.weight
  4 <- 1: 288.8 KiB bfloat16, layers.1.bias layers.1.weight
  5 <- 0: 577.5 KiB, layers.0.bias layers.0.weight
  cut 0: linear_1
  cut 0: linear_2
  cut 0: linear_6

weight_norm: 4 buckets in 4 segments
  0 <- 3: 1158.0 KiB, layers.6.bias .. 4 .. layers.5.parametrizations.weight.original1
  1 <- 2: 1158.0 KiB, layers.4.bias .. 4 .. layers.3.parametrizations.weight.original1
  2 <- 1: 1158.0 KiB, layers.2.bias .. 4 .. layers.1.parametrizations.weight.original1
  3 <- 0: 579.0 KiB, layers.0.bias .. 1 .. layers.0.parametrizations.weight.original1
  cut 0: x_2
  cut 0: x_6
  cut 0: x_10

spectral_norm: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.6.bias .. 2 .. layers.5.parametrizations.weight.original
  1 <- 2: 1155.0 KiB, layers.4.bias .. 2 .. layers.3.parametrizations.weight.original
  2 <- 1: 1155.0 KiB, layers.2.bias .. 2 .. layers.1.parametrizations.weight.original
  3 <- 0: 577.5 KiB, layers.0.bias layers.0.parametrizations.weight.original
  cut 0: weight_mat_1
  cut 0: weight_mat_3
  cut 0: weight_mat_5

flat_storage: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, biases.7 weights.7 biases.6 weights.6
  1 <- 2: 1155.0 KiB, biases.5 weights.5 biases.4 weights.4
  2 <- 1: 1155.0 KiB, biases.3 weights.3 biases.2 weights.2
  3 <- 0: 1155.0 KiB, biases.1 weights.1 biases.0 weights.0
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6

complex: 4 buckets in 4 segments
  0 <- 3: 1026.0 KiB, last.bias last.weight
  1 <- 2: 1032.0 KiB complex64, mixers.2 mixers.1
  2 <- 1: 516.0 KiB complex64, mixers.0
  3 <- 0: 1026.0 KiB, first.bias first.weight
  cut 0: spectrum_1
  cut 0: spectrum_3
  cut 0: out""",
    )


def test_plans_of_sharing() -> None:
    assert_expected_inline(
        plans_of(sharing),
        """\
tied: 4 buckets in 4 segments
  0 <- 3: 1156.5 KiB, layers.7.bias layers.6.bias layers.6.weight layers.5.bias layers.5.weight
  1 <- 2: 1155.0 KiB, layers.4.bias layers.4.weight layers.3.bias layers.3.weight
  2 <- 1: 1155.0 KiB, layers.2.bias layers.2.weight layers.1.bias layers.1.weight
  3 <- 0: 577.5 KiB, layers.0.bias layers.0.weight
  cut 0: linear_1
  cut 0: linear_3
  cut 0: linear_5

shared_module: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6

called_twice: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_5
  cut 0: linear_7

frozen: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.10.bias layers.10.weight layers.8.bias layers.8.weight
  1 <- 2: 1155.0 KiB, layers.7.bias layers.7.weight layers.5.bias layers.5.weight
  2 <- 1: 1155.0 KiB, layers.4.bias layers.4.weight layers.2.bias layers.2.weight
  3 <- 0: 577.5 KiB, layers.1.bias layers.1.weight
  cut 0: linear_2
  cut 0: linear_5
  cut 0: linear_8

ignored: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.9.bias layers.9.weight layers.8.bias layers.8.weight
  1 <- 2: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  2 <- 1: 1155.0 KiB, layers.4.bias layers.4.weight layers.3.bias layers.3.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_3
  cut 0: linear_6
  cut 0: linear_8

unused: 5 buckets in 5 segments
  0 <- 4: 1155.0 KiB, layers.7.bias layers.8.weight layers.8.bias layers.7.weight
  1 <- 3: 1155.0 KiB, layers.5.bias layers.6.weight layers.6.bias layers.5.weight
  2 <- 2: 1155.0 KiB, layers.3.bias layers.4.weight layers.4.bias layers.3.weight
  3 <- 1: 1155.0 KiB, layers.1.bias layers.2.weight layers.2.bias layers.1.weight
  4 <- 0: 577.5 KiB, layers.0.weight layers.0.bias
  cut 0: linear_1
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6
  unread: layers.2.weight layers.2.bias

unused_static: 5 buckets in 5 segments
  0 <- 4: 1155.0 KiB, layers.8.bias layers.8.weight layers.7.bias layers.7.weight
  1 <- 3: 1155.0 KiB, layers.6.bias layers.6.weight layers.5.bias layers.5.weight
  2 <- 2: 1155.0 KiB, layers.4.bias layers.4.weight layers.3.bias layers.3.weight
  3 <- 1: 1155.0 KiB, layers.2.bias layers.2.weight layers.1.bias layers.1.weight
  4 <- 0: 577.5 KiB, layers.0.bias layers.0.weight
  cut 0: linear_1
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6
  unread: layers.2.weight layers.2.bias""",
    )


def test_plans_of_control() -> None:
    assert_expected_inline(
        plans_of(control),
        """\
autocast: 4 buckets in 4 segments
  0 <- 3: 1203.8 KiB, blocks.4.down.bias .. 4 .. blocks.3.down.weight
  1 <- 2: 1205.6 KiB, blocks.3.up.bias .. 4 .. blocks.2.up.weight
  2 <- 1: 1203.8 KiB, blocks.1.down.bias .. 4 .. blocks.0.down.weight
  3 <- 0: 402.5 KiB, blocks.0.up.bias blocks.0.up.weight
  cut 0: y
  cut 0: linear_4
  cut 0: y_3

no_grad: 3 buckets in 2 segments
  0 <- 1: 1203.8 KiB, blocks.4.down.bias .. 4 .. blocks.3.down.weight
  1 <- 1: 2008.8 KiB, blocks.3.up.bias .. 8 .. blocks.1.up.weight
  2 <- 0: 803.1 KiB, blocks.0.down.bias blocks.0.down.weight blocks.0.up.bias blocks.0.up.weight
  cut 0: truediv

graph_break: 6 buckets in 4 segments
  0 <- 3: 1203.8 KiB, blocks.5.down.bias .. 4 .. blocks.4.down.weight
  1 <- 3: 1205.6 KiB, blocks.4.up.bias .. 4 .. blocks.3.up.weight
  2 <- 3: 1203.8 KiB, blocks.2.down.bias .. 4 .. blocks.1.down.weight
  3 <- 2: 402.5 KiB, blocks.1.up.bias blocks.1.up.weight
  4 <- 1: 400.6 KiB, blocks.0.down.bias blocks.0.down.weight
  5 <- 0: 402.5 KiB, blocks.0.up.bias blocks.0.up.weight
  cut 0: y
  cut 1: y
  unread: blocks.2.up.weight .. 14 .. blocks.5.down.bias

view_across_break: 5 buckets in 5 segments
  0 <- 4: 1203.8 KiB, blocks.5.down.bias .. 4 .. blocks.4.down.weight
  1 <- 3: 1205.6 KiB, blocks.4.up.bias .. 4 .. blocks.3.up.weight
  2 <- 2: 1203.8 KiB, blocks.2.down.bias .. 4 .. blocks.1.down.weight
  3 <- 1: 1205.6 KiB, blocks.1.up.bias .. 4 .. blocks.0.up.weight
  4 <- 0: 400.0 KiB, head.weight
  cut 0: linear
  cut 0: y_1
  cut 1: y_1

checkpoint: 4 buckets in 4 segments
  0 <- 3: 1203.8 KiB, blocks.5.down.bias .. 4 .. blocks.4.down.weight
  1 <- 2: 1205.6 KiB, blocks.4.up.bias .. 4 .. blocks.3.down.weight
  2 <- 1: 1203.8 KiB, blocks.2.down.bias .. 4 .. blocks.1.down.weight
  3 <- 0: 1205.6 KiB, blocks.1.up.bias .. 4 .. blocks.0.down.weight
  cut 0: tag_activation_checkpoint_2
  cut 0: tag_activation_checkpoint_4
  cut 0: tag_activation_checkpoint_6

selective_checkpoint: 4 buckets in 4 segments
  0 <- 3: 1203.8 KiB, blocks.5.down.bias .. 4 .. blocks.4.down.weight
  1 <- 2: 1205.6 KiB, blocks.4.up.bias .. 4 .. blocks.3.down.weight
  2 <- 1: 1203.8 KiB, blocks.2.down.bias .. 4 .. blocks.1.down.weight
  3 <- 0: 1205.6 KiB, blocks.1.up.bias .. 4 .. blocks.0.down.weight
  cut 0: tag_activation_checkpoint_2
  cut 0: tag_activation_checkpoint_4
  cut 0: tag_activation_checkpoint_6

cond: 4 buckets in 3 segments
  0 <- 2: 1606.2 KiB, blocks.4.down.bias .. 6 .. blocks.5.down.weight
  1 <- 1: 1606.2 KiB, blocks.2.down.bias .. 6 .. blocks.3.down.weight
  2 <- 0: 1206.2 KiB, blocks.0.down.bias .. 5 .. blocks.1.up.weight
  3 <- 0: 400.0 KiB, blocks.1.down.weight
  cut 0: cond_1
  cut 0: cond_2

autograd_function: 4 buckets in 4 segments
  0 <- 3: 1158.0 KiB, scales.7 layers.7.bias layers.7.weight scales.6 layers.6.bias layers.6.weight
  1 <- 2: 1158.0 KiB, scales.5 layers.5.bias layers.5.weight scales.4 layers.4.bias layers.4.weight
  2 <- 1: 1158.0 KiB, scales.3 layers.3.bias layers.3.weight scales.2 layers.2.bias layers.2.weight
  3 <- 0: 1158.0 KiB, scales.1 layers.1.bias layers.1.weight scales.0 layers.0.bias layers.0.weight
  cut 0: arg_2
  cut 0: arg_4
  cut 0: arg_6""",
    )


def test_plans_of_dataflow() -> None:
    assert_expected_inline(
        plans_of(dataflow),
        """\
in_place: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6

views_in_place: 3 buckets in 3 segments
  0 <- 2: 1203.8 KiB, layers.7.bias .. 4 .. layers.5.weight
  1 <- 1: 1203.8 KiB, layers.4.bias .. 4 .. layers.2.weight
  2 <- 0: 2405.0 KiB, layers.1.bias .. 4 .. first.weight
  cut 0: linear_3
  cut 0: linear_6

dropout: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6

transposed: 4 buckets in 4 segments
  0 <- 3: 1152.0 KiB, weights.7 weights.6
  1 <- 2: 1152.0 KiB, weights.5 weights.4
  2 <- 1: 1152.0 KiB, weights.3 weights.2
  3 <- 0: 1152.0 KiB, weights.1 weights.0
  cut 0: matmul_2
  cut 0: matmul_4
  cut 0: matmul_6

several_outputs: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6

tuples: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6

buffers: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: y_2
  cut 0: y_4
  cut 0: y_6""",
    )


def test_plans_of_scalars() -> None:
    assert_expected_inline(
        plans_of(scalars),
        """\
stochastic_depth: 6 buckets in 4 segments
  0 <- 3: 1026.0 KiB, blocks.2.second.bias blocks.2.second.weight
  1 <- 3: 1026.0 KiB, blocks.2.first.bias blocks.2.first.weight
  2 <- 3: 1026.0 KiB, blocks.1.second.bias blocks.1.second.weight
  3 <- 2: 1026.0 KiB, blocks.1.first.bias blocks.1.first.weight
  4 <- 1: 1026.0 KiB, blocks.0.second.bias blocks.0.second.weight
  5 <- 0: 1026.0 KiB, blocks.0.first.bias blocks.0.first.weight
  cut 0: linear_1
  cut 1: linear_1
  unread: blocks.2.first.weight .. 2 .. blocks.2.second.bias

scalars: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6

dynamic_batch: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.7.bias layers.7.weight layers.6.bias layers.6.weight
  1 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  2 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4
  cut 0: linear_6""",
    )


def test_plans_of_ddp_rows() -> None:
    assert_expected_inline(
        plans_of(ddp_rows),
        """\
linear8: 8 buckets in 8 segments
  0 <- 7: 4100.0 KiB, layers.7.bias layers.7.weight
  1 <- 6: 4100.0 KiB, layers.6.bias layers.6.weight
  2 <- 5: 4100.0 KiB, layers.5.bias layers.5.weight
  3 <- 4: 4100.0 KiB, layers.4.bias layers.4.weight
  4 <- 3: 4100.0 KiB, layers.3.bias layers.3.weight
  5 <- 2: 4100.0 KiB, layers.2.bias layers.2.weight
  6 <- 1: 4100.0 KiB, layers.1.bias layers.1.weight
  7 <- 0: 4100.0 KiB, layers.0.bias layers.0.weight
  cut 0: linear_1
  cut 0: linear_2
  cut 0: linear_3
  cut 0: linear_4
  cut 0: linear_5
  cut 0: linear_6
  cut 0: linear_7

cap_below_1: 16 buckets in 16 segments
  0 <- 15: 257.0 KiB, layers.15.bias layers.15.weight
  1 <- 14: 257.0 KiB, layers.14.bias layers.14.weight
  2 <- 13: 257.0 KiB, layers.13.bias layers.13.weight
  3 <- 12: 257.0 KiB, layers.12.bias layers.12.weight
  4 <- 11: 257.0 KiB, layers.11.bias layers.11.weight
  5 <- 10: 257.0 KiB, layers.10.bias layers.10.weight
  6 <- 9: 257.0 KiB, layers.9.bias layers.9.weight
  7 <- 8: 257.0 KiB, layers.8.bias layers.8.weight
  8 <- 7: 257.0 KiB, layers.7.bias layers.7.weight
  9 <- 6: 257.0 KiB, layers.6.bias layers.6.weight
  10 <- 5: 257.0 KiB, layers.5.bias layers.5.weight
  11 <- 4: 257.0 KiB, layers.4.bias layers.4.weight
  12 <- 3: 257.0 KiB, layers.3.bias layers.3.weight
  13 <- 2: 257.0 KiB, layers.2.bias layers.2.weight
  14 <- 1: 257.0 KiB, layers.1.bias layers.1.weight
  15 <- 0: 257.0 KiB, layers.0.bias layers.0.weight
  cut 0: linear_1
  cut 0: linear_2
  cut 0: linear_3
  cut 0: linear_4
  cut 0: linear_5
  cut 0: linear_6
  cut 0: linear_7
  cut 0: linear_8
  cut 0: linear_9
  cut 0: linear_10
  cut 0: linear_11
  cut 0: linear_12
  cut 0: linear_13
  cut 0: linear_14
  cut 0: linear_15

cap_5: 3 buckets in 3 segments
  0 <- 2: 5130.0 KiB, layers.13.bias .. 8 .. layers.9.weight
  1 <- 1: 5130.0 KiB, layers.8.bias .. 8 .. layers.4.weight
  2 <- 0: 4104.0 KiB, layers.3.bias .. 6 .. layers.0.weight
  cut 0: linear_4
  cut 0: linear_9

cap_list: 8 buckets in 8 segments
  0 <- 7: 3078.0 KiB, layers.9.bias .. 4 .. layers.7.weight
  1 <- 6: 1026.0 KiB, layers.6.bias layers.6.weight
  2 <- 5: 1026.0 KiB, layers.5.bias layers.5.weight
  3 <- 4: 1026.0 KiB, layers.4.bias layers.4.weight
  4 <- 3: 1026.0 KiB, layers.3.bias layers.3.weight
  5 <- 2: 1026.0 KiB, layers.2.bias layers.2.weight
  6 <- 1: 1026.0 KiB, layers.1.bias layers.1.weight
  7 <- 0: 1026.0 KiB, layers.0.bias layers.0.weight
  cut 0: linear_1
  cut 0: linear_2
  cut 0: linear_3
  cut 0: linear_4
  cut 0: linear_5
  cut 0: linear_6
  cut 0: linear_7

sequential: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, 14.bias 14.weight 12.bias 12.weight
  1 <- 2: 1155.0 KiB, 10.bias 10.weight 8.bias 8.weight
  2 <- 1: 1155.0 KiB, 6.bias 6.weight 4.bias 4.weight
  3 <- 0: 1155.0 KiB, 2.bias 2.weight 0.bias 0.weight
  cut 0: input_5
  cut 0: input_9
  cut 0: input_13""",
    )


def test_plans_of_reports_graphs() -> None:
    assert_expected_inline(
        plans_of(reports_graphs),
        """\
where_scalars: 3 buckets in 3 segments
  0 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  1 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  2 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: y_2
  cut 0: y_4

forward_calls: 3 buckets in 3 segments
  0 <- 2: 1203.8 KiB, layers.4.bias .. 4 .. layers.2.weight
  1 <- 1: 1203.8 KiB, layers.1.bias .. 4 .. attention.out_proj.weight
  2 <- 0: 1203.8 KiB, attention.in_proj_bias attention.in_proj_weight
  cut 0: t_1
  cut 0: linear_2

flex_attention: 3 buckets in 3 segments
  0 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  1 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  2 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4

static_twice: 3 buckets in 3 segments
  0 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  1 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  2 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_5

donated_buffers: 3 buckets in 3 segments
  0 <- 2: 1026.0 KiB, last.bias last.weight
  1 <- 1: 1026.0 KiB, second.bias second.weight
  2 <- 0: 1026.0 KiB, first.bias first.weight
  cut 0: linear_1
  cut 0: out

conv_strides: 3 buckets in 3 segments
  0 <- 2: 1153.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  1 <- 1: 1153.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  2 <- 0: 1153.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: conv2d_2
  cut 0: conv2d_4""",
    )


def test_plans_of_reports_shapes() -> None:
    assert_expected_inline(
        plans_of(reports_shapes),
        """\
growing_length: 3 buckets in 3 segments
  0 <- 2: 1026.0 KiB, layers.2.bias layers.2.weight
  1 <- 1: 1026.0 KiB, layers.1.bias layers.1.weight
  2 <- 0: 1026.0 KiB, layers.0.bias layers.0.weight
  cut 0: linear_1
  cut 0: linear_2

checkpoint_sizes: 3 buckets in 3 segments
  0 <- 2: 1152.0 KiB, layers.5.weight layers.4.weight
  1 <- 1: 1152.0 KiB, layers.3.weight layers.2.weight
  2 <- 0: 1152.0 KiB, layers.1.weight layers.0.weight
  cut 0: tag_activation_checkpoint_3
  cut 0: tag_activation_checkpoint_6

transposed_batch: 3 buckets in 3 segments
  0 <- 2: 1248.0 KiB, last.bias last.weight layers.5.weight layers.4.weight
  1 <- 1: 1152.0 KiB, layers.3.weight layers.2.weight
  2 <- 0: 1152.0 KiB, layers.1.weight layers.0.weight
  cut 0: linear_2
  cut 0: linear_4

uneven_ranks: 3 buckets in 3 segments
  0 <- 2: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  1 <- 1: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  2 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 0: linear_4""",
    )


def test_plans_of_reports_wrapping() -> None:
    assert_expected_inline(
        plans_of(reports_wrapping),
        """\
evaluated: 2 buckets in 2 segments
  0 <- 1: 1817.5 KiB, last.bias last.weight up.bias up.weight
  1 <- 0: 918.1 KiB, deep.bias deep.weight down.bias down.weight
  cut 0: conv2d_2

synced_norm: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  1 <- 2: 580.5 KiB, layers.3.bias layers.3.weight norm.bias norm.weight
  2 <- 1: 577.5 KiB, layers.2.bias layers.2.weight
  3 <- 0: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  cut 0: linear_2
  cut 1: linear_1
  unread: norm.weight norm.bias

nested: 4 buckets in 4 segments
  0 <- 3: 1155.0 KiB, layers.5.bias layers.5.weight layers.4.bias layers.4.weight
  1 <- 2: 1155.0 KiB, layers.3.bias layers.3.weight layers.2.bias layers.2.weight
  2 <- 1: 1155.0 KiB, layers.1.bias layers.1.weight layers.0.bias layers.0.weight
  3 <- 0: 577.5 KiB, inner.0.bias inner.0.weight
  cut 1: linear_2
  cut 1: linear_4""",
    )
