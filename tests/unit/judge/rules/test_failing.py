"""ddpopt.judge.rules.failing: what ranks say of a failure, and whether time alone is to blame."""

import re

import pytest
import torch
from expecttest import assert_expected_inline

from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.judge.rules.failing import Failure, failure_of, in_words, stalled

TIMED_OUT = failure_of(0, RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9000ms"))
LEFT = failure_of(1, RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4"))
RAISED = failure_of(1, ValueError("no good"))


def test_a_peer_that_was_only_late_is_no_failure_of_the_mode_and_the_flag_is_named() -> None:
    assert_expected_inline(
        stalled([TIMED_OUT, LEFT], 2, 9),
        """\
no rank failed on its own: each waited for another in a collective, for up to 9 s (rank 0: RuntimeError: \
[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9000ms; rank 1: RuntimeError: \
[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4). If a rank compiles for longer than \
that, raise the time limit of a trial (--timeout); if not, the ranks do not run the same collectives in \
the same order""",
    )


def test_an_operator_that_refuses_is_identified_by_its_caller() -> None:
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    with pytest.raises(RuntimeError) as caught:
        torch.ops.aten.view_as_real.default(lazy)
    words = in_words(caught.value)
    assert words.startswith("RuntimeError: view_as_real doesn't work on unresolved conjugated tensors.")
    assert words.endswith("is_identified_by_its_caller: torch.ops.aten.view_as_real.default(lazy))")
    assert words.count(".py:") == 1


def test_a_failure_names_the_users_line_and_torchs_own() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 2)(torch.ones(3))
    code = r"torch.nn.Linear\(2, 2\)\(torch.ones\(3\)\)"
    where = rf" \({__file__}:\d+ in test_\w+: {code}\) \(linear\.py:\d+ in forward\)$"
    assert re.search(where, in_words(caught.value))


@pytest.mark.parametrize(
    ("failures", "size", "waited"),
    [
        pytest.param([TIMED_OUT, RAISED], 2, False, id="where a rank raised its peers only felt it"),
        pytest.param([TIMED_OUT], 2, False, id="a rank that got through sent nothing"),
        pytest.param([TIMED_OUT], 1, False, id="a rank without peers waits for nobody"),
        pytest.param([], 2, False, id="no rank failed"),
    ],
)
def test_ranks_waited_where_all_did_nothing_else(failures: list[Failure], size: int, waited: bool) -> None:
    assert bool(stalled(failures, size, 9)) is waited


def test_data_of_another_size_is_the_modes_own_failure() -> None:
    said = "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 40 vs 20. "
    assert not failure_of(0, RuntimeError(f"{said}Received data size doesn't match expected size.")).lost
    assert TIMED_OUT.lost
    assert LEFT.lost


def test_only_what_ddpopt_says_it_does_not_do_is_a_refusal() -> None:
    assert failure_of(0, UnsupportedError("mine has no no_sync()")).refused
    assert not failure_of(0, UnsupportedError("no")).refused
    assert not failure_of(0, RuntimeError("mine has no no_sync()")).refused
    assert not failure_of(0, UsageError("no tensor in the output")).refused
