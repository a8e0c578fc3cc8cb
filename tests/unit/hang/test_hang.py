"""ddpopt.hang: the first difference between what ranks sent is found, and a dump is only data."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.errors import UsageError, numbered
from ddpopt.hang import Flight, RecordedCollective, diagnose, read

KINDS = st.sampled_from(["all_reduce", "broadcast", "all_gather"])
COLLECTIVES = st.lists(st.tuples(st.sampled_from(["0 (default_pg)", "1"]), KINDS), max_size=12)


def flight(rank: int, collectives: list[tuple[str, str]], size: int) -> Flight:
    count: dict[str, int] = {}
    sent: list[RecordedCollective] = []
    for group, kind in collectives:
        count[group] = count.get(group, 0) + 1
        sent.append(
            RecordedCollective(group, count[group], kind, "Float [4]", f"train.py:{len(sent)} in step")
        )
    return Flight(rank, tuple(sent), dict.fromkeys(count, tuple(range(size))))


@given(COLLECTIVES, st.integers(1, 4))
def test_ranks_that_sent_the_same_do_not_part(collectives: list[tuple[str, str]], size: int) -> None:
    found = diagnose([flight(rank, collectives, size) for rank in range(size)], size)
    assert (found.divergences, found.absent, found.exit_code) == ((), (), 3)


@given(COLLECTIVES.filter(bool), st.integers(2, 5), st.data())
def test_the_rank_that_sends_another_or_one_less_is_named_where_it_parts(
    collectives: list[tuple[str, str]], size: int, data: st.DataObject
) -> None:
    odd = data.draw(st.integers(0, size - 1))
    place = data.draw(st.integers(0, len(collectives) - 1))
    ends = data.draw(st.booleans())
    group, kind = collectives[place]
    changed = [*collectives]
    changed[place] = (group, "reduce_scatter")
    own = collectives[:place] if ends else changed
    flights = [flight(rank, own if rank == odd else collectives, size) for rank in range(size)]
    found = diagnose(flights, size)
    divergence = next(each for each in found.divergences if each.group == group)
    assert divergence.number == [name for name, _ in collectives[: place + 1]].count(group)
    assert found.exit_code == 1
    assert f"train.py:{place} in step" in str(divergence)
    if ends:
        assert [*divergence.missing] == [odd]
        assert f"rank {odd} has not entered it" in str(divergence)
    else:
        assert divergence.entered[odd].kind == "reduce_scatter"
        assert {each.kind for rank, each in divergence.entered.items() if rank != odd} == {kind}


OVER = st.tuples(*[st.sampled_from([True, False, None])] * 4)
"""Whether each of four collectives of a rank has completed."""


@given(st.lists(OVER, min_size=2, max_size=4))
def test_the_first_collective_in_which_ranks_wait_is_named(over: list[tuple[bool | None, ...]]) -> None:
    flights = [
        Flight(
            rank,
            tuple(
                RecordedCollective("0", number, "all_reduce", "Float [8]", "a.py:3 in f", is_over=is_over)
                for number, is_over in enumerate(of_rank, 1)
            ),
        )
        for rank, of_rank in enumerate(over)
    ]
    waits = [[rank for rank in range(len(over)) if over[rank][place] is False] for place in range(4)]
    said = [str(divergence) for divergence in diagnose(flights).divergences]
    first = next((place for place, ranks in enumerate(waits) if ranks), None)
    if first is None:
        assert said == []
        return
    where = f"group 0, collective {first + 1}: all ranks entered all_reduce of Float [8] (a.py:3 in f)"
    network = "; none is missing, so look at the network between them"
    which = f"{numbered('rank', waits[first])}{network if len(waits[first]) == len(over) else ''}"
    assert said == [f"{where}, and it has not completed on {which}"]


def test_what_older_recorders_have_dropped_is_not_taken_for_missing() -> None:
    all_of_them = [RecordedCollective("0", number, "all_reduce", "Float [4]") for number in range(1, 9)]
    assert diagnose([Flight(0, tuple(all_of_them)), Flight(1, tuple(all_of_them[4:]))]).divergences == ()


def test_sizes_may_differ_where_each_rank_sends_its_own() -> None:
    for kind, parts in (("all_to_all", 0), ("gather", 0), ("all_gather", 1), ("reduce_scatter", 1)):
        flights = [Flight(rank, (RecordedCollective("0", 1, kind, f"Float [{rank}]"),)) for rank in (0, 1)]
        assert len(diagnose(flights).divergences) == parts


def test_groups_of_one_name_with_other_ranks_are_not_compared() -> None:
    sent = [RecordedCollective("1", 1, kind, "Float [4]") for kind in ("all_reduce", "broadcast")]
    flights = [
        Flight(rank, (sent[rank // 2],), {"1": (rank // 2 * 2, rank // 2 * 2 + 1)}) for rank in range(4)
    ]
    assert diagnose(flights).divergences == ()


def test_many_ranks_that_are_behind_are_named_together() -> None:
    first = RecordedCollective("0", 1, "all_reduce", "Float [4]", "a.py:3 in f")
    second = RecordedCollective("0", 2, "broadcast", "Float [8]", "a.py:4 in f")
    (divergence,) = diagnose(
        [Flight(0, (first, second)), *(Flight(n, (first,)) for n in range(1, 64))]
    ).divergences
    assert str(divergence) == (
        "group 0, collective 2: rank 0 sent broadcast of Float [8] (a.py:4 in f); ranks 1-63 have not "
        "entered it; the last before was 1, all_reduce of Float [4] (a.py:3 in f)"
    )


def test_a_rank_without_a_dump_is_named() -> None:
    found = diagnose([flight(0, [("1", "broadcast")], 3), flight(2, [("1", "broadcast")], 3)], 4)
    assert found.absent == (1, 3)
    assert "ranks 1, 3 left no dump" in str(found)
    assert "rank 2: group 1, collective 1, broadcast of Float [4] (train.py:0 in step)" in str(found)
    assert json.loads(found.to_json())["absent"] == [1, 3]
    with pytest.raises(UsageError, match="world_size: expected a positive number, got 0"):
        diagnose([], 0)


ENTRY = {
    "record_id": 0, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "is_p2p": False,
    "profiling_name": "nccl:all_reduce", "input_sizes": [[2, 3]], "input_dtypes": ["Float"],
    "state": "started",
    "frames": [
        {"filename": "/venv/lib/torch/distributed/distributed_c10d.py", "line": 1, "name": "all_reduce"},
        {"filename": "/home/me/train.py", "line": 7, "name": "step"},
    ],
}  # fmt: skip
CONFIG = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}


def written(folder: Path, name: str, dump: Any) -> Path:
    (folder / name).write_bytes(dump if isinstance(dump, bytes) else pickle.dumps(dump))
    return folder / name


def test_a_dump_of_nccl_is_read_with_the_users_line(tmp_path: Path) -> None:
    written(tmp_path, "nccl_trace_rank_1", {"entries": [ENTRY], "pg_config": CONFIG, "version": "2.10"})
    written(tmp_path, ".writing-77", b"not finished")
    (found,) = read([tmp_path])
    line = "train.py:7 in step"
    assert found.sent == (
        RecordedCollective("0 (default_pg)", 1, "all_reduce", "Float [2, 3]", line, is_over=False),
    )
    assert (found.rank, found.groups) == (1, {"0 (default_pg)": (0, 1)})


class Harm:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/harmed",)


@pytest.mark.parametrize(
    ("name", "dump", "words"),
    [
        ("rank_0", {"entries": [Harm()]}, "it asks for posix.system"),
        ("rank_0", b"", "expected a dump of torch's flight recorder"),
        ("rank_0", {"more": 1}, "with entries"),
        ("dump", {"entries": []}, "expected a name that ends with the rank, such as rank_3"),
    ],
)
def test_what_is_no_dump_is_refused_and_nothing_in_it_runs(
    tmp_path: Path, name: str, dump: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        read([written(tmp_path, name, dump)])
    with pytest.raises(UsageError, match=words):
        read([tmp_path])


def test_files_that_are_missing_or_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a_0", "b_0"):
        written(tmp_path, name, {"entries": []})
    with pytest.raises(UsageError, match="expected one dump of each rank, got two of rank 0"):
        read([tmp_path])
    with pytest.raises(UsageError, match="rank_9: No such file"):
        read([tmp_path / "rank_9"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="expected dumps, got none"):
        read([tmp_path / "empty"])
