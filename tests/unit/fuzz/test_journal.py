"""What a campaign writes down: a line a model, whole or not there, and only in a folder of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from ddpopt.errors import UsageError
from ddpopt.fuzz.journal import LINES, CampaignPlan, Entry, Journal, summarized
from ddpopt.fuzz.questions import Answer, Outcome
from ddpopt.fuzz.signatures import FailureSignature

THE_PLAN = CampaignPlan(3, 0, ("whole", "ddpopt-split"), "aot_eager", 1, ("cond",), "2.13.0", "5f")
ANSWERS = (Answer("whole", Outcome.OK), Answer("ddpopt-split", Outcome.WRONG, FailureSignature("L0", "loss")))


def entry(place: int) -> Entry:
    return Entry(place, 1.5, ("conv", "norm"), ANSWERS)


def test_an_entry_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    journal = Journal(tmp_path, THE_PLAN)
    journal.add(entry(0))
    assert (tmp_path / LINES).read_text() == f"{entry(0).to_line()}\n"
    (tmp_path / LINES).unlink()
    (tmp_path / LINES).symlink_to("/dev/full")
    with pytest.raises(UsageError, match=r"^--out: cannot write '.*journal\.jsonl': No space left on device"):
        journal.add(entry(1))
    assert journal.entries == [entry(0)]


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"place": 0}', "words"])
def test_a_line_that_no_campaign_wrote_is_named(damaged: str, tmp_path: Path) -> None:
    Journal(tmp_path, THE_PLAN)
    (tmp_path / LINES).write_text(f"{entry(0).to_line()}\n{damaged}\n{entry(1).to_line()}\n")
    with pytest.raises(UsageError, match=r"line 2 of .*journal\.jsonl' was not written by a campaign"):
        Journal(tmp_path, THE_PLAN)


@pytest.mark.parametrize(("modes", "distinct"), [(("ddpopt-split",), 0), (("whole",), 1)])
def test_a_failure_of_the_backend_counts_where_it_was_asked(modes: tuple[str, ...], distinct: int) -> None:
    found = Answer(modes[0], Outcome.BACKEND, FailureSignature("L0", "loss"))
    summary = summarized(replace(THE_PLAN, modes=modes), [replace(entry(0), answers=(found,))])
    assert (len(summary.failures), summary.distinct) == (1, distinct)


SHARES = [
    ((), 3),  # nothing was judged
    ((Outcome.OK,), 0),
    ((Outcome.REFUSED, Outcome.OK), 0),
    ((Outcome.REFUSED, Outcome.REFUSED, Outcome.OK), 3),
    ((Outcome.EAGER, *[Outcome.OK] * 19), 0),
    ((Outcome.EAGER, *[Outcome.OK] * 18), 3),
    ((Outcome.BROKEN, *[Outcome.OK] * 18), 3),
    ((Outcome.BROKEN, Outcome.WRONG), 1),
]


@pytest.mark.parametrize(("kinds", "exit_code"), SHARES)
def test_a_campaign_that_judged_too_little_is_no_pass(kinds: tuple[Outcome, ...], exit_code: int) -> None:
    signature = FailureSignature("L0", "loss")
    entries = [
        replace(entry(place), answers=(Answer("ddpopt-split", kind, signature),))
        for place, kind in enumerate(kinds)
    ]
    summary = summarized(replace(THE_PLAN, modes=("ddpopt-split",)), entries)
    assert summary.exit_code == exit_code
    assert bool(summary.unjudged) is (exit_code == 3 or Outcome.BROKEN in kinds)
