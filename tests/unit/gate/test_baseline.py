"""The baseline's file: the same for the same figures, read back equal, refused where it does not fit."""

import json
from pathlib import Path

import pytest

from ddpopt.gate.baseline import Baseline, Measuring, named, read, write
from tests.support.gate_figures import CASE, FIGURES
from tests.support.refusals import refusal

BASELINE = Baseline(Measuring(("gpt", "tied"))).with_figures("torch 2.13", FIGURES)
OWN = Path(__file__).parents[3] / "ci" / "baseline.json"


def test_a_baseline_that_was_written_is_read_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    assert read(file) is None
    assert write(BASELINE, file)
    assert read(file) == BASELINE
    assert BASELINE.figures("torch 2.13", file) == FIGURES
    assert not write(BASELINE, file)


def test_figures_of_one_release_leave_those_of_another_alone_and_order_is_no_difference() -> None:
    both = BASELINE.with_figures("torch 2.12", {"gpt": CASE})
    assert sorted(both.measured) == ["torch 2.12", "torch 2.13"]
    assert both.measured["torch 2.13"] == BASELINE.measured["torch 2.13"]
    turned = dict(reversed(list(FIGURES.items())))
    assert BASELINE.with_figures("torch 2.13", turned).to_text() == BASELINE.to_text()


def test_figures_of_another_release_of_torch_are_refused_with_advice() -> None:
    assert refusal(lambda: BASELINE.figures("torch 2.12", Path("b.json"))) == (
        "b.json: expected figures for torch 2.12, which is running here, found torch 2.13. Plans and "
        "graphs differ between releases of torch: install one that the baseline has, or run 'ddpopt gate "
        "--baseline b.json --update' under torch 2.12, which adds them"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSONDecodeError: Expecting property name"),
        ('{"ddpopt_gate": 1}', "ValueError: ddpopt_gate is 1, expected 2; write it again"),
        ('{"ddpopt_gate": 2, "settings": {"speed": 1}, "measured": {}}', "unexpected keyword argument"),
    ],
)
def test_a_file_that_is_no_baseline_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    assert said in refusal(lambda: read(file))


def test_the_repositorys_own_baseline_measures_cases_that_exist() -> None:
    own = read(OWN)
    assert own is not None
    assert set(own.settings.targets) <= set(named(("corpus",)))
    assert own.to_text() == OWN.read_text()
    assert json.loads(OWN.read_text())["measured"]
