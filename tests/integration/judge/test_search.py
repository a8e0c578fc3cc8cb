"""The search on one rank: which rung is wrong, and what must be compiled for it."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ddpopt.judge.locate import layer_of
from ddpopt.judge.locating.rungs import Known, Question, Stage, Symptom, Try, stages_of
from ddpopt.judge.locating.search import EARLY, search
from ddpopt.ranks.group import joined

MODULE = "tests.unit.miscompiled"

Searching = Callable[..., Known]


@pytest.fixture
def searching(one_rank_group: None, fresh_dynamo: None) -> Searching:
    def run(
        target: str,
        mode: str,
        backend: str,
        *stages: Stage,
        known: Known | None = None,
        seconds: float = 600.0,
    ) -> Known:
        question, known = Question(target, "default", mode, backend, steps=1), known or Known()
        with joined() as ranks:
            search(ranks, question, stages or tuple(stages_of(question, 1)), seconds, known)
        c10d: Any = dist  # private: torch counts its groups nowhere else
        assert len(c10d.distributed_c10d._world.pg_map) == 1, "a process group is left behind"
        return known

    return run


def segments(known: Known) -> list[str]:
    return [segment.partition(" (")[0] for segment in known.segments]


def rungs(known: Known) -> dict[str, bool]:
    return {rung.name: rung.agrees for rung in known.rungs}


@pytest.mark.parametrize(
    ("target", "mode", "backend", "guilty"),
    [
        ("stages", "local", "losing_bias", "graph 0, segments 2 to 3 of 8: linear"),
        ("short", "ddpopt-inline", "refusing_tanh", "graph 0, segment 1 of 2: tanh"),
    ],
)
def test_the_segments_that_a_backend_gets_wrong_are_found(
    searching: Searching, target: str, mode: str, backend: str, guilty: str
) -> None:
    known = searching(f"{MODULE}:{target}", "ddpopt-inline", backend, Stage(mode, backend))
    assert (segments(known), known.about_segments) == ([guilty], "")


def test_a_search_without_time_blames_all_that_it_knows_to_show_it(searching: Searching) -> None:
    stage = Stage("local", "scaling_tanh")
    known = searching(f"{MODULE}:short", "whole", "scaling_tanh", stage, seconds=0.0)
    assert (segments(known), known.about_segments) == (["graph 0, segments 0 to 1 of 2: linear"], EARLY)


def test_what_took_its_ranks_down_before_is_not_tried_again(searching: Searching) -> None:
    stage, died = Stage("local", "dying_on_tanh"), Symptom("died", "SIGSEGV")
    symptoms: dict[Try, Symptom | None] = {
        Try(stage, exact=False): died,
        Try(stage, range(1, sys.maxsize), exact=False): died,
    }
    known = Known(stage=stage, symptom=died, symptoms=symptoms)
    searching(f"{MODULE}:short", "whole", "dying_on_tanh", stage, known=known)
    assert segments(known) == ["graph 0, segment 1 of 2: tanh"]


def test_segments_wrong_only_once_the_mode_has_cut_are_found_among_its_own(searching: Searching) -> None:
    own = Stage("ddpopt-split", "wrong_apart")
    known = searching(f"{MODULE}:CUT", "ddpopt-split", "wrong_apart", Stage("whole", "wrong_apart"), own)
    assert list(rungs(known).values()) == [True, False]
    (guilty,) = segments(known)
    assert guilty.startswith("compiled segment 2 of 4: ")


def test_what_fails_though_nothing_is_compiled_has_no_segment_to_blame(searching: Searching) -> None:
    known = searching("cap_below_1", "torch", "eager", Stage("whole", "eager"), Stage("torch", "eager"))
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
