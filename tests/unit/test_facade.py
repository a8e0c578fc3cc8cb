"""The package's public names: each is the one documented, and none is imported before it is used."""

from importlib import import_module
from types import FunctionType, ModuleType

import pytest

import ddpopt


@pytest.mark.parametrize("name", ["explain", "impose", "observe", "plan"])
def test_a_module_does_not_hide_the_function_of_its_name(name: str) -> None:
    module = import_module(f"ddpopt.{name}")
    assert isinstance(module, ModuleType)
    assert isinstance(getattr(ddpopt, name), FunctionType | type)
    setattr(ddpopt, name, module)  # as Python does after each first import
    assert getattr(ddpopt, name) is not module


def test_every_public_name_is_there_and_listed() -> None:
    for name in ddpopt.__all__:
        assert name in dir(ddpopt)
        assert callable(getattr(ddpopt, name))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ddpopt' has no attribute 'plans'"):
        getattr(ddpopt, "plans")  # noqa: B009  # mypy knows the name is none
