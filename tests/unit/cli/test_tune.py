"""``ddpopt tune``: what it shows and writes, and how it ends where ranks cannot train the model."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from expecttest import assert_expected_inline

from ddpopt.cli import tuning
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Plan
from ddpopt.ranks.failures import RankFailure, RanksFailed
from ddpopt.tuning.comparing import Row, Tuned, gain_of
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import plan_of, tune
from tests.support.commands import run

SPECS = [ParamSpec(f"p{index}", 1 << 20, "float32", "cpu") for index in range(4)]
PROFILE = Profile(tuple(Gradient(s, 0.01) for s in SPECS), 0.01, 0.02, 0.01, "inline", 2, {})
LINK = Link(1e-3, 1e-8, 0.0, 1.0, 0.05, "gloo", 2, {})


def found(
    _: object, __: object, ___: object, ____: object, link: Link | None, caps: object, most: float
) -> Tuned:
    """As `tuned_on` on ranks would."""
    plans = {"bucket_cap_mb_list=[3, 1, 0.5, 0.25]": plan_of([SPECS], "a cap")}
    plans["tuned"] = tune(PROFILE, link or LINK, most)
    rows = [Row(name, p, simulate(p, PROFILE, link or LINK), (0.1, 0.2, 0.3)) for name, p in plans.items()]
    return Tuned(PROFILE, link or LINK, tuple(rows), gain_of(rows, link))


def test_the_table_is_narrow_and_files_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "launch", lambda _, *args, **__: [found(None, *args)])
    monkeypatch.setenv("COLUMNS", "60")
    files = {name: tmp_path / f"t.{name}" for name in ("json", "html", "trace")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    result = run("tune", "tied", "--world-size", "64", "--most-mb", "2", *words)
    assert_expected_inline(
        result.stdout,
        """\
tied on 2 ranks, inline
link: gloo, 2 ranks, 1.00 ms a bucket, 10.49 ms a MiB, 5%
off in the median

buckets                         predicted  measured  exposed
------------------------------------------------------------
bucket_cap_mb_list=[3, 1, 0.5,    71.9 ms  200.0 ms  31.9 ms
0.25]
  1 bucket, MiB: first 4.00,
  last 4.00, largest 4.00;
  efficiency 55.6%
tuned                             71.9 ms  200.0 ms  31.9 ms
  2 buckets, MiB: first 2.00,
  last 2.00, largest 2.00;
  efficiency 55.6%
64 ranks, tree                   113.9 ms         -  73.9 ms
  2 buckets, MiB: first 2.00,
  last 2.00, largest 2.00;
  efficiency 35.1%

Not tuned: a step is 0.0 ms shorter than with
bucket_cap_mb_list=[3, 1, 0.5, 0.25] (measured, noise 0.0
ms).
What is written has the buckets of bucket_cap_mb_list=[3, 1,
0.5, 0.25].
A link that is slower than this one may gain more. Where you
train: torchrun --nproc-per-node N -m ddpopt link --json
link.json. Then: ddpopt tune tied --link link.json

More ranks than were measured: a model, in which all ranks
are alike, each hop is as on this link, and each rank keeps
its batch.
""",
    )
    assert max(map(len, result.stdout.splitlines())) <= 60
    assert [len(bucket.params) for bucket in Plan.from_json(files["json"].read_text()).buckets] == [4]
    assert "64 ranks, tree" in files["html"].read_text()
    assert "traceEvents" in files["trace"].read_text()
    assert run("tune", "tied", "--link", str(files["json"])).exit_code == 0  # it has a link, too


def test_what_a_rank_cannot_use_alone_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, code in {"ddpopt.errors.UsageError": 2, "RuntimeError": 1}.items():
        stack = f'Traceback (most recent call last):\n  File "a.py", line 1\n{kind}: none of\n  them\n'
        failed = RanksFailed([RankFailure(0, "raised", "running the task", 1, stack=stack)], 2)
        monkeypatch.setattr(tuning, "launch", Mock(side_effect=failed))
        result = run("link")
        assert (result.exit_code, result.stdout) == (code, "")
        assert (result.stderr == "ddpopt: error: none of them\n") == (code == 2)
