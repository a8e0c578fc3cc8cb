"""Which profile is chosen, how many examples it gives a test, and where it keeps those that failed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.profiles import EXAMPLES, load_profiles, share


@pytest.fixture(autouse=True)
def loaded_before() -> Iterator[None]:
    before = settings.get_current_profile_name()
    yield
    settings.load_profile(before)


@pytest.mark.parametrize(
    ("named", "ci", "name"), [("", "false", "dev"), ("", "true", "ci"), ("nightly", "true", "nightly")]
)
def test_a_test_draws_its_share_of_the_profiles_examples_and_in_ci_the_same_each_time(
    named: str, ci: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable, value in (("HYPOTHESIS_PROFILE", named), ("CI", ci), ("DDPOPT_EXAMPLE_DATABASE", tmp_path)):
        monkeypatch.setenv(variable, str(value))
    load_profiles()
    assert settings().deadline is None
    assert settings().derandomize is (name == "ci")
    assert name != "nightly" or settings().database == DirectoryBasedExampleDatabase(tmp_path)
    assert share(1).max_examples == EXAMPLES[name]
    assert share(1e-9).max_examples == 1
    assert share(0.01, at_least=3).max_examples == max(3, EXAMPLES[name] // 100)
