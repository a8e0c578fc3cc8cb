"""ddpopt.judge.simulation.sequences: ranks that send something else are named, in any order of groups."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.judge.simulation.sequences import Sequences
from ddpopt.judge.simulation.world import RankSend
from ddpopt.observation.launches import Launch

ALL = "all"


def sent(op: str = "allreduce", nbytes: int = 4, group: str = ALL, where: str = "") -> RankSend:
    return RankSend(Launch(op, nbytes // 4, nbytes, "float32", in_backward=not where, group=group), where)


def compared(
    of_ranks: Sequence[Sequence[RankSend]], members: Mapping[str, Sequence[int]] | None = None
) -> Sequences:
    sequences = Sequences(lambda: members or {})
    for rank, each in enumerate(of_ranks):
        sequences.add(rank, each)
    return sequences


@given(st.lists(st.sampled_from([4, 8, 12]), max_size=6), st.integers(1, 5))
def test_equal_sequences_are_equal(sizes: list[int], ranks: int) -> None:
    assert compared([[sent(nbytes=size) for size in sizes]] * ranks).are_equal


@given(st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=6), st.data())
def test_the_first_difference_of_the_fewest_ranks_is_named(sizes: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(sizes) - 1))
    odd = data.draw(st.integers(0, 4))
    usual = [sent(nbytes=size) for size in sizes]
    other = [*usual[:place], sent(nbytes=100), *usual[place + 1 :]]
    (parting,) = compared([other if rank == odd else usual for rank in range(5)]).partings()
    assert (parting.ranks, parting.index) == ((odd,), place)
    assert parting.theirs is other[place]
    assert parting.ours is not None
    assert parting.ours.launch == usual[place].launch


def test_a_rank_that_sends_less_has_nothing_where_others_go_on() -> None:
    (parting,) = compared([[sent(), sent(nbytes=8)], [sent()], [sent(), sent(nbytes=8)]]).partings()
    assert (parting.theirs, parting.counts) == (None, (1, 2))
    assert "nothing on rank 1" in str(parting)


@pytest.mark.parametrize("op", ["allgather_base", "all_gather_into_tensor"])
def test_what_is_written_by_hand_and_by_a_compiler_is_the_same(op: str) -> None:
    assert compared([[sent("allgather")], [sent(op)]]).are_equal


def test_sizes_may_differ_where_each_rank_sends_its_own_and_sends_between_two_ranks_are_left_out() -> None:
    assert compared([[sent("alltoall", 4), sent("send")], [sent("alltoall", 8)]]).are_equal


def message(op: str, peer: int, nbytes: int = 4) -> RankSend:
    launch = Launch(op, nbytes // 4, nbytes, "float32", in_backward=False, group=ALL, peer=peer)
    return RankSend(launch, "train.py:1")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from([4, 8])), max_size=8), st.data()
)
def test_each_message_must_be_received(sent_by: list[tuple[int, int, int]], data: st.DataObject) -> None:
    of_ranks: list[list[RankSend]] = [[] for _ in range(4)]
    for sender, distance, nbytes in sent_by:
        receiver = (sender + distance) % 4
        of_ranks[sender].append(message("send", receiver, nbytes))
        of_ranks[receiver].append(message("recv", sender, nbytes))
    assert not [*compared(of_ranks).partings()]
    if not sent_by:
        return
    rank = data.draw(st.sampled_from([rank for rank, own in enumerate(of_ranks) if own]))
    lost = of_ranks[rank].pop(data.draw(st.integers(0, len(of_ranks[rank]) - 1)))
    (parting,) = compared(of_ranks).partings()
    assert {*parting.ranks, *parting.peers} == {rank, lost.launch.peer}


@pytest.mark.parametrize("change", [{"reduction": "max"}, {"peer": 1}])
def test_a_reduction_and_a_root_must_be_equal(change: dict[str, Any]) -> None:
    usual = sent("reduce")
    other = replace(usual, launch=replace(usual.launch, **change))
    (parting,) = compared([[usual], [other], [usual]]).partings()
    assert parting.ranks == (1,)


def test_only_members_of_a_group_are_compared_in_it() -> None:
    members = {"pair": [2, 3]}
    alone = [sent()]
    both = [sent(), sent(group="pair")]
    assert compared([alone, alone, both, both], members).are_equal
    (parting,) = compared([alone, alone, both, alone], members).partings()
    assert {*parting.ranks, *parting.peers} == {2, 3}


def test_two_groups_in_another_order_are_a_difference_for_their_common_members() -> None:
    members = {"pair": [0, 1]}
    first = [sent(), sent(group="pair")]
    (parting,) = compared([first, first[::-1], [sent()]], members).partings()
    assert {*parting.ranks, *parting.peers} <= {0, 1}
