"""What every case of the corpus promises: it repeats, differs per rank and step, and fills buckets."""

import pickle

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddpopt.cases import corpus
from ddpopt.testing import Case

MIB = 2**20
# Those that Dynamo might not capture as one graph; test_corpus_training.py compiles them.
ALL = pytest.mark.parametrize("case", corpus.cases(), ids=lambda case: case.name)


def gradients(case: Case, rank: int = 0, step: int = 0) -> dict[str, Tensor | None]:
    """Run forward and backward of a new model in eager."""
    model = case.model()
    case.step(model, rank, step).backward()  # type: ignore[no-untyped-call]  # as in torch
    named = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    return {name: grad.to_dense() if grad is not None else None for name, grad in named}


def tensors(case: Case, rank: int, step: int) -> list[Tensor]:
    """Return the tensors among a case's inputs."""
    return [leaf for leaf in tree_leaves(case.inputs(rank, step)) if isinstance(leaf, Tensor)]


@ALL
def test_gradients_repeat_bit_by_bit_and_all_but_the_declared_ones_are_there_and_finite(case: Case) -> None:
    first, again = gradients(case), gradients(case)
    other = gradients(case, 1) if case.unused else first  # experts may be unused on some ranks only
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    missing = {name for rank in (first, other) for name, grad in rank.items() if grad is None}
    assert missing == set(case.unused)
    found = [grad for rank in (first, other) for grad in rank.values() if grad is not None]
    assert all(bool(torch.isfinite(grad).all()) for grad in found)


@ALL
def test_every_rank_and_step_has_inputs_of_its_own_drawn_by_no_default_generator(case: Case) -> None:
    before = torch.random.get_rng_state()
    case.model()
    first = tensors(case, 0, 0)
    assert all(map(torch.equal, first, tensors(case, 0, 0)))
    for other in (tensors(case, 1, 0), tensors(case, 0, 1)):
        assert not all(map(torch.equal, first, other))
    assert torch.equal(before, torch.random.get_rng_state())


@ALL
def test_caps_up_to_2_5_mib_give_several_buckets(case: Case) -> None:
    ignored = getattr(case.model(), "_ddp_params_and_buffers_to_ignore", ())
    named = case.model().named_parameters()
    params: list[Tensor] = [param for name, param in named if param.requires_grad and name not in ignored]
    own = case.ddp_kwargs.get("bucket_cap_mb_list", [case.ddp_kwargs.get("bucket_cap_mb", 2.5)])
    for limits in (own, [2.5]):  # and more with smaller caps
        sizes = [int(cap * MIB) for cap in limits]
        buckets, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(params, sizes)
        assert len(buckets) > 1


@ALL
def test_a_case_survives_pickling_into_another_process(case: Case) -> None:
    copy = pickle.loads(pickle.dumps(case))
    assert copy.name == case.name
    assert all(map(torch.equal, copy.model().parameters(), case.model().parameters()))
