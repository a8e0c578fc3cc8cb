"""The settings in the conftest.py at the root of the repository."""

import os
import shutil
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT_CONFTEST = Path(__file__).parents[3] / "conftest.py"
STALE_SNAPSHOT = '''
import expecttest

class TestSnapshot(expecttest.TestCase):
    def test_sum(self) -> None:
        self.assertExpectedInline(str(1 + 1), """3""")
'''


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Make a project with this repository's conftest and one snapshot that differs."""
    for name in [*os.environ]:
        if name in {"EXPECTTEST_ACCEPT", "WORLD_SIZE", "CI"} or name.startswith("PYTEST_XDIST"):
            monkeypatch.delenv(name)
    shutil.copy(ROOT_CONFTEST, pytester.path / "conftest.py")
    pytester.makepyfile(test_snapshot=STALE_SNAPSHOT)
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    # Without our own plugin, which would import torch in each of these processes.
    return project.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:ddpopt", *args)


@pytest.mark.parametrize("options", [(), ("-n", "2"), ("--dist", "load", "--tx", "2*popen")])
def test_one_process_accepts_snapshots_however_many_are_asked_for(
    project: pytest.Pytester, options: tuple[str, ...]
) -> None:
    result = run(project, "--accept", *options)
    result.assert_outcomes(passed=1)
    assert "workers" not in result.stdout.str()
    assert '"""2"""' in (project.path / "test_snapshot.py").read_text()


def test_one_worker_runs_every_test_that_starts_ranks_beside_the_others(project: pytest.Pytester) -> None:
    body = "import pytest\n@pytest.mark.parametrize('number', range(4))\ndef test_one(number): pass"
    for folder in ("tests/unit", "tests/multigpu"):
        (project.path / folder).mkdir(parents=True)
        (project.path / folder / "test_some.py").write_text(body)
    result = run(project, "-n", "2", "-v", "--import-mode=importlib", "tests")
    result.assert_outcomes(passed=8)
    first: dict[str, str] = {}
    workers = set()
    for line in (line for line in result.outlines if "PASSED" in line):
        worker = line.partition("]")[0]
        first.setdefault(worker, line)
        workers |= {worker} if "multigpu" in line else set()
    assert len(workers) == 1
    # at once, while the other worker runs those without ranks
    assert sorted("multigpu" in line for line in first.values()) == [False, True]
