"""Examples that a property is always tried on: models that the fuzzer found, parameters of the corpus.

The profile ``dev`` has a few seconds for all that is drawn, and does without them.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from hypothesis import example, settings

from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.fuzz.cases import FoundCase
from ddpopt.planning.bucket_rule import BucketConfig, ParamSpec, specs_from_module
from ddpopt.planning.limits import DDP_ARGUMENTS_OF_LIMITS
from tests.found import fails_undivided, found_cases

Test = Callable[..., None]


def with_found_models(test: Test) -> Test:
    """Add each model of ``tests/data/found`` without a cond to a test of one drawn model."""
    return _with(test, lambda: ((case.model,) for case in _without_cond()))


def with_found_models_that_compile(test: Test) -> Test:
    """Add those that torch itself gets right in one piece, to a test that compiles."""
    return _with(test, lambda: ((case.model,) for case in _without_cond() if not fails_undivided(case)))


def with_parameters_of_the_corpus(test: Test) -> Test:
    """Add each case's parameters, under its own limits, to a test of a drawn list and drawn limits."""
    return _with(test, _of_the_corpus)


def _with(test: Test, examples: Callable[[], Iterable[tuple[Any, ...]]]) -> Test:
    if settings.get_current_profile_name() != "dev":
        for arguments in examples():
            test = example(*arguments)(test)
    return test


def _without_cond() -> list[FoundCase]:
    """In eager, too, torch compiles a cond by way of its DDPOptimizer: drawn models there have none."""
    return [case for case in found_cases() if "cond" not in case.model.features]


@cache
def _of_the_corpus() -> tuple[tuple[tuple[ParamSpec, ...], BucketConfig], ...]:
    return tuple((specs_from_module(case.model()), _limits(case)) for case in corpus.cases())


def _limits(case: Case) -> BucketConfig:
    given = {name: value for name, value in case.ddp_kwargs.items() if name in DDP_ARGUMENTS_OF_LIMITS}
    return BucketConfig.from_kwargs(**given)
