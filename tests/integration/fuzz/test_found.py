"""The failures that were found: each is told in full, and ddpopt gets its model right, bit for bit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpopt.fuzz.asking import as_scripted
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.questions import Outcome
from ddpopt.fuzz.scripting import script_of
from ddpopt.fuzz.signatures import ROUNDING
from ddpopt.judge.locating.scripting import shows
from ddpopt.ranks.group import Ranks
from tests.support.found import FOLDER, OURS, examined, fails_undivided, found_cases

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


def test_found_cases_exist_and_their_files_are_named_for_the_failure() -> None:
    names = [file.stem for file in sorted(FOLDER.glob("*.json"))]
    assert names
    assert names == [case.stem for case in found_cases()]


def test_the_page_on_fuzzing_names_cases_that_there_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "fuzzing.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9-]+-[0-9a-f]{6})`", page))
    assert named - {case.stem for case in found_cases()} == set()


def in_each_mode() -> list[Any]:
    """By day every sixth in the mode that was wrong once; what torch alone got wrong is none of ours."""
    return [
        pytest.param(
            case,
            n,
            marks=() if n == case.mode and place % 6 == 0 else pytest.mark.nightly,
            id=f"{case.stem}-{n}",
        )
        for place, case in enumerate(found_cases())
        for n in (*OURS, "ddpopt-step")
        if n in OURS or (n == case.mode and torch.__version__ >= "2.13")
        if not fails_undivided(case)
    ]


@pytest.mark.parametrize(("case", "mode"), in_each_mode())
def test_ddpopt_gets_the_model_right_bit_by_bit(case: FoundCase, mode: str, alone: Ranks) -> None:
    (answer,) = examined(alone, case.model, mode)
    assert answer.kind is Outcome.OK or answer.detail.startswith("nothing was judged"), answer
    assert answer.mode == mode


def undivided() -> list[Any]:
    """All cases of torch's alone, of which the first one is looked at by day."""
    cases = [case for case in found_cases() if fails_undivided(case)]
    first, *others = cases
    return [first, *(pytest.param(case, marks=pytest.mark.nightly) for case in others)]


@pytest.mark.parametrize("case", undivided(), ids=lambda case: case.stem)
def test_what_torch_gets_wrong_in_one_piece_is_not_blamed_on_ddpopt(
    case: FoundCase, alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # torch's partitioner leaves files where it fails
    if torch.__version__.partition("+")[0] != case.torch:
        pytest.skip(f"seen with torch {case.torch}")
    answers = examined(alone, case.model, *OURS)
    if case.signature == ROUNDING and all(answer.kind is Outcome.OK for answer in answers):
        pytest.skip("with this processor's kernels AOTAutograd's sums have the last bits of eager's")
    assert [(answer.mode, answer.kind) for answer in answers] == [(name, Outcome.BACKEND) for name in OURS]


TORCHS = [case for case in found_cases() if case.is_torchs]


@pytest.mark.nightly
@pytest.mark.parametrize("case", TORCHS, ids=lambda case: case.stem)
def test_the_script_shows_the_failure_where_torch_has_it(case: FoundCase, tmp_path: Path) -> None:
    if torch.__version__.partition("+")[0] != case.torch:
        pytest.skip(f"seen with torch {case.torch}")
    script = tmp_path / f"{case.stem}.py"
    death = case.signature.what if case.signature.kind == "death" else ""

    def shown(candidate: FoundCase) -> bool:
        script.write_text(script_of(candidate, script.name))
        return bool(shows(script, candidate.setting.nproc, 250, death=death))

    assert any(map(shown, as_scripted(case)))
