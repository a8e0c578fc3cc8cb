"""Examples that a property is always tried on: models that the fuzzer found, parameters of the corpus.

By day ``tests/integration/fuzz/test_found.py`` judges those models, so they are added in the profile
``nightly``; the parameters of the corpus not in the profile ``dev``, which has a few seconds for all.
"""

from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import example, settings

from ddpopt.cases import corpus
from ddpopt.planning.bucket_rule import specs_from_module
from ddpopt.planning.limits import DDP_ARGUMENTS_OF_LIMITS, BucketConfig
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


def with_parameters_of_the_corpus(test: Test) -> Test:
    """Add each case's parameters, under its own limits, to a test of a drawn list and drawn limits."""
    for arguments in _of_the_corpus() if settings.get_current_profile_name() != "dev" else ():
        test = example(*arguments)(test)
    return test


def _of_the_corpus() -> Iterator[tuple[Any, ...]]:
    for case in corpus.cases():
        limits = {name: value for name, value in case.ddp_kwargs.items() if name in DDP_ARGUMENTS_OF_LIMITS}
        yield specs_from_module(case.model()), BucketConfig.from_kwargs(**limits)
