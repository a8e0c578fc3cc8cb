"""``ddpopt verify`` where ranks die, stall, or are torchrun's: its exit codes, and that nothing is left."""

import json
import os
from pathlib import Path

import pytest

from ddpopt.judge.trials import Asked
from ddpopt.judge.verdict import Status
from tests.selftest.faults import FAULTS
from tests.selftest.self_test import self_test
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
    assert [link for link in Path("/proc").glob("[0-9]*/cwd") if _resolves_to(link, folder)] == []


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


@pytest.mark.nightly
def test_a_fault_that_takes_the_ranks_down_is_found_and_the_next_one_is_tried() -> None:
    names = ("one rank's reducer has other buckets", "a gradient is zeroed")
    clean = {"rounding": [Asked("tied", "default", ("ddpopt-inline",))]}
    result = self_test(2, faults=[fault for fault in FAULTS if fault.name in names], clean=clean)
    assert {found.fault: found.by for found in result.found} == {
        "one rank's reducer has other buckets": ("ranks",),
        "a gradient is zeroed": ("L0", "L1"),
    }
    assert [trial.backend for trial in result.clean.trials if "L2" in trial.levels] == ["rounding"]
    assert result.clean_runs == 1
    assert result


def _resolves_to(link: Path, folder: Path) -> bool:
    try:
        return Path(os.readlink(link)) == folder
    except OSError:
        return False
