"""Hypothesis profiles: how many examples a run draws, whether it draws the same again, what it remembers.

``dev`` is for whoever writes code: few examples, new ones each time. ``ci`` draws the same on every run, so
that a red build is red for its author too. ``nightly`` draws new ones for hours, and keeps what failed in a
database that several machines may share. A test says how many examples it is worth compared to others, in
shares of the profile's, so that one word makes a whole suite longer or shorter.

Invariant: no profile has a deadline. Drawn examples compile graphs and start ranks, and the first one pays
for imports: a deadline would judge the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from ddpopt.errors import UsageError

EXAMPLES: Mapping[str, int] = {"dev": 5, "ci": 100, "nightly": 10_000}
"""How many examples a test of share 1 draws, by the name of the profile."""
PROFILE = "HYPOTHESIS_PROFILE"
"""Names the environment variable that chooses a profile."""
DATABASE = "DDPOPT_EXAMPLE_DATABASE"
"""Names the environment variable with the nightly database: a folder, or the address of a Redis server."""
_REDIS = ("redis://", "rediss://", "unix://")


def register_profiles() -> None:
    """Make the profiles known to Hypothesis, for pytest's ``--hypothesis-profile`` too."""
    patient = [HealthCheck.too_slow]  # it would judge the machine too
    # In CI, Hypothesis's own default would draw the same each time, whatever profile was asked for.
    base = settings(deadline=None, suppress_health_check=patient, derandomize=False)
    settings.register_profile("dev", base, max_examples=EXAMPLES["dev"])
    settings.register_profile(
        "ci", base, max_examples=EXAMPLES["ci"], derandomize=True, database=None, print_blob=True
    )
    settings.register_profile(
        "nightly",
        base,
        max_examples=EXAMPLES["nightly"],
        database=shared_database(os.environ.get(DATABASE) or ".hypothesis/examples"),
        print_blob=True,
    )


def load_profile(name: str | None = None) -> str:
    """Register the profiles and make one of them the default.

    Call it in ``conftest.py``; pytest's ``--hypothesis-profile`` then still wins.

    Args:
        name: of the profile; by default `profile_of_environment` says.

    Returns:
        Its name.

    Raises:
        UsageError: there is no such profile.
    """
    chosen = name or profile_of_environment(os.environ)
    if chosen not in EXAMPLES:
        raise UsageError(
            f"expected the name of a profile ({', '.join(EXAMPLES)}), got {chosen!r}; "
            f"set {PROFILE} to one of them, or leave it out"
        )
    register_profiles()
    settings.load_profile(chosen)
    return chosen


def profile_of_environment(environment: Mapping[str, str]) -> str:
    """Choose a profile: ``HYPOTHESIS_PROFILE`` if it is set, else ``ci`` where ``CI`` is true, else ``dev``.

    >>> profile_of_environment({"CI": "true"}), profile_of_environment({})
    ('ci', 'dev')
    """
    in_ci = environment.get("CI", "").lower() in {"1", "true", "yes"}
    return environment.get(PROFILE) or ("ci" if in_ci else "dev")


def share(portion: float, *, at_least: int = 1) -> settings:
    """Give a test so many times the examples of the profile.

    Args:
        portion: 1 for a test whose examples take about ten milliseconds; less where each takes longer.
        at_least: so many examples whatever the profile.

    Returns:
        A decorator, or the settings of a state machine; of the profile that is loaded now.
    """
    default = settings()
    return settings(default, max_examples=max(at_least, round(default.max_examples * portion)))


def shared_database(address: str, given_as: str = DATABASE) -> ExampleDatabase:
    """Open a database of examples, which several machines may share.

    Args:
        address: a folder, or ``redis://host:port/number``.
        given_as: the option or variable that has the address, for errors.

    Raises:
        UsageError: it is neither, or the package ``redis`` is not installed.
    """
    folder = Path(address)
    if not address.startswith(_REDIS):
        if not address or "://" in address or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{given_as}: expected a folder or redis://host:port/number, got {address!r}")
        return DirectoryBasedExampleDatabase(folder)
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis  # type: ignore[import-not-found, unused-ignore]  # who wants it installs it

        return RedisExampleDatabase(Redis.from_url(address))
    except ImportError as error:
        raise UsageError(
            f"{given_as}: {address!r} needs a client for Redis; 'pip install redis', or name a folder"
        ) from error
    except ValueError as error:
        raise UsageError(f"{given_as}: {address!r} is no address of a server: {error}") from error
