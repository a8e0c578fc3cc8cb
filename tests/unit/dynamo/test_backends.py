"""What ``--backend`` may name."""

import pytest

from ddpopt.dynamo.backends import backend_of
from tests.support import miscompiled
from tests.support.refusals import refusal


def test_a_function_is_found_by_its_module_and_name_and_a_name_of_dynamos_stays_one() -> None:
    assert backend_of("tests.support.miscompiled:scaling_tanh") is miscompiled.scaling_tanh
    assert backend_of("aot_eager") == "aot_eager"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:compiler", "'no_such_module:compiler', which cannot be imported: ModuleNotFound"),
        ("ddpopt-split", "got 'ddpopt-split', which is ddpopt: that is a --mode"),
        ("tests.support.miscompiled:WIDTH", "expected a callable (gm, example_inputs), got "),
    ],
)
def test_an_invalid_backend_is_rejected_with_the_way_to_name_one(name: str, message: str) -> None:
    said = refusal(lambda: backend_of(name))
    assert message in said
    assert said.endswith("give 'package.module:function', or the name of a backend that is registered")
