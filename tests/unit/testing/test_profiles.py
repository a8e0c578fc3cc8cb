"""Which profile is chosen, how many examples it gives a test, and where it keeps those that failed."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from ddpopt.errors import UsageError
from ddpopt.testing.profiles import EXAMPLES, load_profile, profile_of_environment, share, shared_database


@pytest.fixture(autouse=True)
def loaded_before() -> Iterator[None]:
    before = settings.get_current_profile_name()
    yield
    settings.load_profile(before)


def test_a_name_in_the_environment_comes_before_ci() -> None:
    assert profile_of_environment({"HYPOTHESIS_PROFILE": "nightly", "CI": "true"}) == "nightly"
    assert profile_of_environment({"CI": "false"}) == "dev"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_test_draws_its_share_of_the_profiles_examples_and_in_ci_the_same_each_time(name: str) -> None:
    load_profile(name)
    assert settings().deadline is None
    assert settings().derandomize is (name == "ci")
    assert name != "nightly" or settings().database is not None
    assert share(1).max_examples == EXAMPLES[name]
    assert share(2).max_examples == 2 * EXAMPLES[name]
    assert share(1e-9).max_examples == 1
    assert share(0.01, at_least=3).max_examples == max(3, EXAMPLES[name] // 100)


def test_a_profile_that_does_not_exist_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "weekly")
    expected = (
        "expected the name of a profile (dev, ci, nightly), got 'weekly'; "
        "set HYPOTHESIS_PROFILE to one of them, or leave it out"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        load_profile()


def test_examples_that_failed_are_kept_in_the_folder_that_is_named(tmp_path: Path) -> None:
    database = shared_database(str(tmp_path / "shared"))
    assert isinstance(database, DirectoryBasedExampleDatabase)
    database.save(b"test", b"example")
    assert set(shared_database(str(tmp_path / "shared")).fetch(b"test")) == {b"example"}


def test_a_redis_server_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(
        UsageError, match=r"'redis://host:6379/0' needs a client for Redis; 'pip install redis'"
    ):
        shared_database("redis://host:6379/0")
