"""The package's public names: each is the one documented, and none is imported before it is used."""

import pytest

import ddpopt


def test_every_public_name_is_there_and_listed() -> None:
    for name in ddpopt.__all__:
        assert name in dir(ddpopt)
        assert callable(getattr(ddpopt, name))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ddpopt' has no attribute 'plans'"):
        getattr(ddpopt, "plans")  # noqa: B009  # mypy knows the name is none
