"""``ddpopt verify`` as people run it, on ranks that it starts: its exit codes, and what it writes."""

import json
from pathlib import Path

import pytest

from tests.shop import run, write_shop

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


@pytest.mark.nightly
def test_a_model_of_the_transformers_library_is_right() -> None:
    done = run(ROOT, "examples.transformers_gpt2:make")
    assert done.returncode == 0, done.stderr
    assert "RIGHT: examples.transformers_gpt2:make on 2 ranks" in done.stdout


def test_a_backend_that_is_wrong_ends_with_1_and_is_located(folder: Path) -> None:
    done = run(folder, "shop:small", "--backend", "doubling", "--json", "v.json")
    assert done.returncode == 1, done.stderr
    verdict = json.loads((folder / "v.json").read_text())
    assert "L2" in {finding["level"] for trial in verdict["trials"] for finding in trial["findings"]}
    assert not all(rung["agrees"] for rung in verdict["location"]["rungs"])
    assert verdict["location"]["reproduces"]


@pytest.mark.nightly
def test_a_model_that_fails_in_eager_ends_with_3_and_its_error(folder: Path) -> None:
    done = run(folder, "shop:failing", "--backend", "eager")
    assert done.returncode == 3, done.stderr
    assert "ValueError: this model cannot run" in " ".join((done.stdout + done.stderr).split())
