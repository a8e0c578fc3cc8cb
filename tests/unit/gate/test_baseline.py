"""The baseline's file: the same for the same figures, read back equal, refused where it does not fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddpopt.errors import UsageError
from ddpopt.gate.bands import Bands, settled
from ddpopt.gate.baseline import Baseline, read, write
from ddpopt.gate.figures import Figures
from ddpopt.gate.measuring import Settings
from tests.unit.gate_figures import FIGURES, MODE, with_mode

BASELINE = Baseline(Settings(("corpus",), timed=("gpt",))).with_figures("torch 2.13", FIGURES)


def test_a_baseline_that_was_written_is_read_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    assert write(BASELINE, file)
    assert read(file) == BASELINE
    assert BASELINE.figures("torch 2.13", file) == FIGURES


def test_writing_the_same_again_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    write(BASELINE, file)
    assert not write(BASELINE, file)
    again = read(file)
    assert again is not None
    assert again.to_text() == file.read_text()


def test_keys_are_sorted_so_that_order_is_no_difference() -> None:
    turned = replace(FIGURES, cases=dict(reversed(list(FIGURES.cases.items()))))
    assert BASELINE.with_figures("torch 2.13", turned).to_text() == BASELINE.to_text()


def test_figures_of_another_release_of_torch_are_refused_with_advice() -> None:
    with pytest.raises(UsageError) as caught:
        BASELINE.figures("torch 2.12", Path("b.json"))
    assert str(caught.value) == (
        "b.json: expected figures of torch 2.12, which runs here, found torch 2.13. Plans and graphs differ "
        "between releases of torch: install one that is there, or run 'ddpopt gate --baseline b.json "
        "--update' under torch 2.12, which puts its figures beside the others"
    )


def test_figures_of_one_release_leave_those_of_another_alone() -> None:
    both = BASELINE.with_figures("torch 2.12", Figures(FIGURES.cases))
    assert sorted(both.measured) == ["torch 2.12", "torch 2.13"]
    assert both.measured["torch 2.13"] == BASELINE.measured["torch 2.13"]


def test_no_file_is_no_baseline(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected a baseline that 'ddpopt gate' wrote: Expecting property name"),
        ("[]", "expected a JSON object with ddpopt_gate=1, found 'list'"),
        ('{"ddpopt_gate": 2}', "expected a JSON object with ddpopt_gate=1, found 2"),
        (
            '{"ddpopt_gate": 1}',
            "expected a baseline as 'ddpopt gate --update' writes it, got another: KeyError",
        ),
    ],
)
def test_a_file_that_is_no_baseline_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(file)
    assert said in str(caught.value)


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    data = json.loads(BASELINE.to_text())
    data["settings"]["speed"] = 1
    (tmp_path / "b.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="unexpected keyword argument 'speed'"):
        read(tmp_path / "b.json")


def test_figures_within_their_bands_leave_the_baseline_as_it_is() -> None:
    near = with_mode(replace(MODE, potential=0.985, margins={"L0": 0.0, "L1": 0.5}))
    near = replace(near, ratios={"gpt": {"planning": 0.7, "compile, x": 0.9}})
    assert settled(FIGURES, near, Bands()) == FIGURES


def test_figures_out_of_their_bands_are_taken_as_they_are() -> None:
    far = with_mode(replace(MODE, potential=0.9, margins={"L0": 0.0, "L1": 0.7}))
    far = replace(far, ratios={"gpt": {"planning": 0.9, "compile, x": "torch fails: AssertionError"}})
    assert settled(FIGURES, far, Bands()) == far


def test_what_moves_in_no_band_is_taken_as_it_is() -> None:
    other = with_mode(replace(MODE, graphs=2, recompiles=1))
    assert settled(FIGURES, other, Bands()) == other


def test_small_steps_do_not_add_up_to_a_drift() -> None:
    kept = FIGURES
    for potential in (0.99, 0.985, 0.981):
        kept = settled(kept, with_mode(replace(MODE, potential=potential)), Bands())
    assert kept == FIGURES
    below = with_mode(replace(MODE, potential=0.979))
    assert settled(kept, below, Bands()) == below
