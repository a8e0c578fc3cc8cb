"""Examples that a property is always tried on: models that the fuzzer found.

By day ``tests/integration/fuzz/test_found.py`` judges those models, so they are added in the profile
``nightly``.
"""

from collections.abc import Callable

from hypothesis import example, settings

from tests.found import fails_undivided, found_cases

Test = Callable[..., None]


def with_found_models(test: Test, *, compiles: bool = False) -> Test:
    """Add each model of ``tests/data/found`` to a test of one drawn model.

    Not those with a cond, which torch compiles by way of its DDPOptimizer in eager, too; nor, for a test that
    compiles, those that torch itself gets wrong in one piece.
    """
    for case in found_cases() if settings.get_current_profile_name() == "nightly" else ():
        if "cond" not in case.model.features and not (compiles and fails_undivided(case)):
            test = example(case.model)(test)
    return test
