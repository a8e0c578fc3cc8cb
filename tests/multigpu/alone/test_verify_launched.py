"""``ddpopt verify`` where ranks die, stall, or are torchrun's: its exit codes, and that nothing is left."""

import json
from pathlib import Path

import pytest

from ddpopt.judge.verdict import Status
from tests.shop import run, write_shop

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


def test_a_killed_rank_ends_with_3_and_its_name(folder: Path) -> None:
    done = run(folder, "shop:small", "--backend", "killing", "--no-locate", "--json", "-")
    assert done.returncode == 3, done.stderr
    (trial,) = json.loads(done.stdout)["trials"]
    assert trial["status"] == Status.BROKEN
    assert "rank 1 died of SIGKILL" in trial["reason"]


def test_under_torchrun_its_ranks_are_used_and_one_of_them_reports(folder: Path) -> None:
    files = ["--json", "v.json", "--report", "v.xml", "--report", "v.html"]
    done = run(folder, "shop:small", "--backend", "aot_eager", *files, torchrun=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RIGHT: shop:small on 2 ranks") == 1
    assert all((folder / name).stat().st_size > 100 for name in ("v.json", "v.xml", "v.html"))


@pytest.mark.nightly
def test_a_search_under_torchrun_that_does_not_end_is_reported_at_its_limit(folder: Path) -> None:
    files = ["--json", "v.json", "--report", "v.html"]
    done = run(folder, "shop:net", "--backend", "stuck", *files, torchrun=True)
    assert done.returncode == 1, done.stderr
    location = json.loads((folder / "v.json").read_text())["location"]
    assert "the time was over before the search ended" in location["note"]
    assert done.stdout.count("WRONG: shop:net on 2 ranks") == 1
    assert (folder / "v.html").exists()
