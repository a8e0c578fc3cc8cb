"""Looking where a trial goes wrong, from the process that started the ranks; it starts ranks of its own."""

from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from ddpopt.verify.locate import locate
from ddpopt.verify.verdict import Finding, Status, Trial

MODULE = "tests.unit.miscompiled"
pytestmark = pytest.mark.one_process


def wrong(mode: str, backend: str) -> Trial:
    finding = Finding("L2", "as right as eager, as far as rounding goes", "off", rank=0, step=0)
    return Trial("case", mode, "default", backend, Status.WRONG, findings=(finding,))


def test_what_a_single_rank_does_not_show_is_located_on_two_and_shown_under_torchrun(tmp_path: Path) -> None:
    settings = (
        torch._dynamo.config.optimize_ddp,
        torch.random.get_rng_state().sum(),
        torch.is_grad_enabled(),
    )
    found = locate(f"{MODULE}:short", wrong("whole", "wrong_on_rank_1"), tmp_path / "shown.py", limit_s=240)
    assert [rung.name for rung in found.rungs if not rung.agrees] == ["wrong_on_rank_1, whole on 2 ranks"]
    assert found.layer.endswith("under DDP together with the backend wrong_on_rank_1, with 2 ranks")
    assert [segment.partition(" (")[0] for segment in found.segments] == ["graph 0, segment 1 of 2: tanh"]
    assert (found.script, found.reproduces) == ("shown.py", True)
    assert "torchrun --nproc-per-node 2" in found.note
    assert not dist.is_initialized()
    after = (torch._dynamo.config.optimize_ddp, torch.random.get_rng_state().sum(), torch.is_grad_enabled())
    assert settings == after


def test_what_does_not_appear_again_is_said_to_be_gone_and_no_script_is_written(tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    found = locate(f"{MODULE}:short", wrong("whole", "aot_eager"), script, nproc=1)
    assert [rung.agrees for rung in found.rungs] == [True] * 4
    assert found.layer == "none was found: the difference did not appear again"
    assert found.note == "no script was written, for there is nothing that it could show"
    assert (found.segments, found.script, found.reproduces) == ((), "", False)
    assert not script.exists()
