"""Hypothesis profiles: how many examples a run draws, whether it draws the same again, what it remembers.

``dev`` is for whoever writes code: few examples, new ones each time. ``ci`` draws the same on every run, so
that a red build is red for its author too. ``nightly`` draws new ones for hours, and keeps what failed. A
test says how many examples it is worth compared to others, in shares of the profile's.

No profile has a deadline. Drawn examples compile graphs and start ranks, and the first one pays for imports:
a deadline would judge the machine.
"""

import os
from collections.abc import Mapping

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

EXAMPLES: Mapping[str, int] = {"dev": 5, "ci": 30, "nightly": 10_000}
"""How many examples a test of share 1 draws, by the name of the profile."""
PROFILE, DATABASE = "HYPOTHESIS_PROFILE", "DDPOPT_EXAMPLE_DATABASE"
"""Name the environment variables with a profile, and with the folder of the nightly examples."""


def load_profiles() -> None:
    """Register all, for pytest's ``--hypothesis-profile`` too, and load that of the environment."""
    # In CI, Hypothesis's own default would draw the same each time, whatever profile was asked for.
    base = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False)
    kept = DirectoryBasedExampleDatabase(os.environ.get(DATABASE) or ".hypothesis/examples")
    settings.register_profile("dev", base, max_examples=EXAMPLES["dev"])
    told = settings(base, print_blob=True)
    settings.register_profile("ci", told, max_examples=EXAMPLES["ci"], derandomize=True, database=None)
    settings.register_profile("nightly", told, max_examples=EXAMPLES["nightly"], database=kept)
    in_ci = os.environ.get("CI", "").lower() in {"1", "true", "yes"}
    settings.load_profile(os.environ.get(PROFILE) or ("ci" if in_ci else "dev"))


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
