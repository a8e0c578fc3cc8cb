"""ddpopt.torch_private: a torch that lacks what ddpopt uses is one error that says so."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch.distributed as dist

import ddpopt
from ddpopt.errors import UnsupportedError
from ddpopt.torch_private import RELEASES, STEP
from tests.support.commands import run

GONE = "_compute_bucket_assignment_by_size"
ROOT = Path(__file__).parents[2]


def test_a_missing_name_is_told_with_its_cost_and_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, GONE)
    with pytest.raises(UnsupportedError) as raised:
        ddpopt.DdpoptBackend("eager")
    expected = f"lacks 1 .*\n  torch.distributed.{GONE}: buckets cannot be planned .*\nInstall one of these"
    raised.match(f"expected {RELEASES}, got torch .* \\(Python 3.*{expected}")
    result = run("doctor", "cap_5")
    assert (result.exit_code, raised.value.exit_code) == (2, 2)
    assert f"\n  torch.distributed.{GONE}: " in result.stderr


def test_the_facade_reports_a_missing_name_where_an_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: str) -> None:
        raise AttributeError(GONE)

    monkeypatch.setattr(ddpopt, "import_module", failing)
    monkeypatch.delitem(vars(ddpopt), "plan", raising=False)
    with pytest.raises(AttributeError, match=GONE):
        _ = ddpopt.plan
    monkeypatch.delattr(dist, GONE)
    with pytest.raises(UnsupportedError, match=GONE):
        _ = ddpopt.plan
    monkeypatch.setitem(sys.modules, "ddpopt.doctor", None)
    assert f"\n  torch.distributed.{GONE}: " in run("doctor", "cap_5").stderr


def test_each_part_of_torch_that_a_step_replaces_has_its_reason_and_is_missed_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ddpopt.step.accumulation import HOOKS
    from ddpopt.step.tracing import CREATED, Seen, _patches  # not in older releases

    public = {"torch.nn.parallel.DistributedDataParallel.forward", "torch.autograd.backward"}
    public.add("torch.optim.Optimizer.zero_grad")
    public |= {f"torch.amp.grad_scaler.GradScaler.{name}" for name in ("step", "unscale_")}
    replaced = {name.removesuffix(".side_effects") if name in CREATED else name for name in _patches(Seen())}
    assert replaced - public - {*HOOKS} <= STEP.keys()
    monkeypatch.delattr("torch._dynamo.pgo.auto_dynamic")
    with pytest.raises(UnsupportedError, match="auto_dynamic: a schedule compiles a step again"):
        ddpopt.train_step(lambda: None)


def test_the_releases_are_those_of_the_pin_and_no_page_or_comment_has_others() -> None:
    oldest, newest = re.findall(r"2\.(\d+)", RELEASES)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>=2.{oldest},<2.{int(newest) + 1}" in project["dependencies"]
    kinds = ("*.md", "docs/*.md", "ddpopt/**/*.py", "tests/**/*.py")
    texts = {page.name: page.read_text("utf-8") for kind in kinds for page in ROOT.glob(kind)}
    said = {name: re.findall(r"2\.\d+ to 2\.\d+", text) for name, text in texts.items()}
    ours = [f"2.{oldest} to 2.{newest}"]
    expected = {"README.md": ours * 2, "support.md": ours, "torch_private.py": ours}
    assert {name: found for name, found in said.items() if found} == expected
