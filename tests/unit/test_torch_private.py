"""ddpopt.torch_private: a torch that lacks what ddpopt uses is one error that says so."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import ddpopt
from ddpopt.errors import UnsupportedError
from ddpopt.torch_private import require_supported

GONE = "_compute_bucket_assignment_by_size"


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    """What this torch has was looked up before, and is looked up again afterwards."""
    require_supported()
    require_supported.cache_clear()
    yield
    require_supported.cache_clear()


def test_a_missing_name_is_reported_with_what_it_costs_and_the_releases_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(dist, GONE)
    with pytest.raises(UnsupportedError) as raised:
        ddpopt.DdpoptBackend("eager")
    expected = f"lacks 1 .*\n  torch.distributed.{GONE}: buckets cannot be planned .*\nInstall one of these"
    raised.match(f"expected torch 2.11 to 2.13, got torch .*{expected}")


def test_the_facade_reports_a_missing_name_where_an_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: str) -> None:
        raise AttributeError(GONE)

    monkeypatch.setattr(ddpopt, "import_module", failing)
    monkeypatch.delitem(vars(ddpopt), "plan", raising=False)
    with pytest.raises(AttributeError, match=GONE):
        _ = ddpopt.plan
    require_supported.cache_clear()
    monkeypatch.delattr(dist, GONE)
    with pytest.raises(UnsupportedError, match=GONE):
        _ = ddpopt.plan
