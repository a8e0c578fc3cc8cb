"""The search on one rank: which rung is wrong, and what must be compiled for it."""

import sys
from typing import Any

import pytest
import torch.distributed as dist

from ddpopt.judge.locating.locate import layer_of
from ddpopt.judge.locating.rungs import Known, Question, Stage, Symptom, Try
from ddpopt.judge.locating.search import EARLY, search
from ddpopt.ranks.group import joined

MODULE = "tests.support.miscompiled"

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")


def searched(target: str, mode: str, *stages: Stage, known: Any = None, seconds: float = 600) -> Any:
    question, known = Question(target, "default", mode, stages[-1].backend, steps=1), known or Known()
    with joined() as ranks:
        search(ranks, question, stages, seconds, known)
    c10d: Any = dist  # private: torch counts its groups nowhere else
    assert len(c10d.distributed_c10d._world.pg_map) == 1, "a process group is left behind"
    return known


def segments(known: Known) -> list[str]:
    return [segment.partition(" (")[0] for segment in known.segments]


def rungs(known: Known) -> dict[str, bool | None]:
    return {rung.name: rung.agrees for rung in known.rungs}


@pytest.mark.parametrize(
    ("target", "stage", "guilty"),
    [
        ("stages", Stage("local", "losing_bias"), "graph 0, segments 2 to 3 of 8: linear"),
        ("short", Stage("ddpopt-inline", "refusing_tanh"), "graph 0, segment 1 of 2: tanh"),
    ],
)
def test_the_segments_that_a_backend_gets_wrong_are_found(target: str, stage: Stage, guilty: str) -> None:
    known = searched(f"{MODULE}:{target}", "ddpopt-inline", stage)
    assert (segments(known), known.about_segments) == ([guilty], "")


def test_a_search_without_time_blames_all_that_it_knows_to_show_it() -> None:
    known = searched(f"{MODULE}:short", "whole", Stage("local", "scaling_tanh"), seconds=0.0)
    assert (segments(known), known.about_segments) == (["graph 0, segments 0 to 1 of 2: linear"], EARLY)


def test_what_took_its_ranks_down_before_is_not_tried_again() -> None:
    stage, died = Stage("local", "dying_on_tanh"), Symptom("died", "SIGSEGV")
    tried = Try(stage, exact=False), Try(stage, range(1, sys.maxsize), exact=False)
    known = Known(stage=stage, symptom=died, symptoms=dict.fromkeys(tried, died))
    searched(f"{MODULE}:short", "whole", stage, known=known)
    assert segments(known) == ["graph 0, segment 1 of 2: tanh"]


def test_segments_wrong_only_once_the_mode_has_cut_are_found_among_its_own() -> None:
    whole, own = (Stage(mode, "wrong_apart") for mode in ("whole", "ddpopt-split"))
    known = searched(f"{MODULE}:CUT", "ddpopt-split", whole, own)
    assert list(rungs(known).values()) == [True, False]
    (guilty,) = segments(known)
    assert guilty.startswith("compiled segment 2 of 4: ")


def test_what_fails_though_nothing_is_compiled_has_no_segment_to_blame() -> None:
    known = searched("cap_below_1", "torch", Stage("whole", "eager"), Stage("torch", "eager"))
    assert rungs(known) == {"eager, whole on 1 rank": True, "eager, torch on 1 rank": False}
    assert known.segments == ()
    assert known.about_segments == "the difference appears even though no piece is compiled"


@pytest.mark.parametrize(
    ("stage", "symptom", "layer"),
    [
        (Stage("local", "mine"), Symptom("structure"), "the backend mine (in structure only)"),
        (
            Stage("torch", "inductor", 2),
            Symptom("numbers"),
            "the data-parallel mode torch (torch's DDPOptimizer) together with Inductor (backend inductor), "
            "with 2 ranks",
        ),
    ],
)
def test_a_layer_is_named_by_what_its_rung_adds(stage: Stage, symptom: Symptom, layer: str) -> None:
    assert layer_of(stage, symptom) == layer
