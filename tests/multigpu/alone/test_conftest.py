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


@pytest.mark.parametrize("options", [("-n", "2"), ("--dist", "load", "--tx", "2*popen")])
def test_one_process_accepts_snapshots_however_many_are_asked_for(
    project: pytest.Pytester, options: tuple[str, ...]
) -> None:
    # Without our own plugin, which would import torch in each of these processes.
    result = project.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:ddpopt", "--accept", *options)
    result.assert_outcomes(passed=1)
    assert "workers" not in result.stdout.str()
    assert '"""2"""' in (project.path / "test_snapshot.py").read_text()
