"""GitHub's annotations and step summary: what the runner and a reader of the page make of them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from markdown_it import MarkdownIt

from ddpopt.errors import UsageError
from ddpopt.judge.report.github import SHOWN_BY_GITHUB, annotations, step_summary, write_github
from ddpopt.judge.verdict import Finding, Status
from tests.unit.verdicts import (
    CASES,
    all_kinds,
    broken_trial,
    folded,
    impossible_trial,
    location,
    matrix,
    ok_trial,
    verdict,
    wrong_trial,
)

NASTY = "a|b `c` *d* __e__ <b>f</b> [g](h) \\| # ~~i~~ &amp; ::error::"


def decoded(command: str) -> tuple[str, str]:
    """Title and message, as the runner reads a workflow command."""
    match = re.fullmatch(r"::error title=([^:,\r\n]*)::([^\r\n]*)", command)
    assert match is not None, command
    title, message = match.groups()
    for code, character in (("%3A", ":"), ("%2C", ",")):
        title = title.replace(code, character)
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        title, message = title.replace(code, character), message.replace(code, character)
    return title, message


def rendered(text: str) -> str:
    return str(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


def test_a_true_verdict_has_no_annotation() -> None:
    assert annotations(verdict(ok_trial(), impossible_trial())) == []


def test_few_findings_have_an_annotation_each() -> None:
    assert_expected_inline(
        folded("\n".join(annotations(all_kinds()))),
        """\
::error title=ddpopt verify%3A L0 bitwise::pkg.module:model: ddpopt-split / default, aot_eager: an
    aot_eager gradient equals eager's in every bit: layers.0.weight: expected eager's gradient, got
    one that is 512 ULPs away at [3, 4] (bucket 1, rank 1, step 2)
::error title=ddpopt verify%3A L3 structure::pkg.module:model: ddpopt-split / default, aot_eager:
    every planned bucket is reduced exactly once per backward: bucket 1 was reduced 2 times in step
    2 of rank 0, expected 1
::error title=ddpopt verify%3A broken::pkg.module:model: torch / default, aot_eager: rank 1 died
    with signal 9%0AFile "model.py", line 7, in forward%0A  return self.layer(x)""",
    )


def test_many_findings_are_told_reason_by_reason() -> None:
    lines = [decoded(line) for line in annotations(matrix(options=35))]
    assert [title for title, _ in lines] == [
        "ddpopt verify: L0 bitwise, L3 structure",
        "ddpopt verify: broken",
    ]
    assert lines[0][1].startswith(
        "linears: torch / option_00_with_a_name, aot_eager: layers.0.weight: expected"
    )
    assert lines[0][1].endswith("\n(and 23 trials more like it)")


def test_more_reasons_than_github_shows_are_counted() -> None:
    causes = ["fire", "flood", "frost", "fog", "fungus", "famine", "fever", "fatigue", "fame", "fear", "fun"]
    made = verdict(
        *(replace(broken_trial(option=cause), reason=f"a rank died of {cause}") for cause in causes)
    )
    lines = annotations(made)
    assert len(lines) == SHOWN_BY_GITHUB
    assert decoded(lines[-1])[1] == "and 2 reasons more, in the summary of this step"


def test_a_verdict_that_judged_nothing_is_an_error() -> None:
    ((_, message),) = map(decoded, annotations(verdict(impossible_trial())))
    assert message == "NOT JUDGED: pkg.module:model on 2 ranks: no finding; 1 trial not possible"


def test_no_message_ends_its_line_or_changes_in_it() -> None:
    message = "100% of\r\nit: %0A, ::warning::\n::stop-commands::x"
    finding = Finding("a, level: 50%\n", "claim", message)
    (line,) = annotations(verdict(replace(wrong_trial(), findings=(finding,))))
    assert decoded(line) == (
        "ddpopt verify: a, level: 50%\n",
        f"pkg.module:model: ddpopt-split / default, aot_eager: claim: {message}",
    )


def test_the_summary_of_one_wrong_trial() -> None:
    assert_expected_inline(
        folded(step_summary(verdict(wrong_trial(), location=location()))),
        """\
## :x: WRONG: pkg.module:model

On 2 ranks: 2 findings; 1 trial wrong.

torch 2.13.0; ddpopt 0.1.0; python 3.11.2; device cpu; platform Linux

### W1: wrong, 1 trial

**L0 bitwise** does not hold: an aot\\_eager gradient equals eager's in every bit.

- pkg.module:model: ddpopt-split / default, aot\\_eager: layers.0.weight: expected eager's gradient,
    got one that is 512 ULPs away at \\[3, 4\\] (bucket 1, rank 1, step 2)

**L3 structure** does not hold: every planned bucket is reduced exactly once per backward.

- pkg.module:model: ddpopt-split / default, aot\\_eager: bucket 1 was reduced 2 times in step 2 of
    rank 0, expected 1

### Where it goes wrong

| tried | result | seen |
| --- | --- | --- |
| eager, DDP | agrees |  |
| aot\\_eager, no DDP | agrees |  |
| aot\\_eager, DDP | differs | layers.0.weight, 512 ULPs |

The lowest layer that is wrong: **what ddpopt does around the compiled code**.

The smallest set of compiled segments that shows it:

- graph 0, segment 1: linear, relu

Script: repro\\_linears.py (run in a fresh interpreter, it shows the difference).

<details><summary>Errors, the worst first</summary>

| parameter | level | bucket | ULPs | error | bound | error/bound |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| layers.0.weight | L0 | 1 | 512 | 3e-05 | 0 | inf |
| layers.0.bias | L1 | 1 | 1 | 1e-08 | 4e-08 | 0.25 |
| layers.0.weight | L1 | 1 | 1 | 1e-08 | 4e-08 | 0.25 |
| layers.1.bias | L1 | 0 | 1 | 1e-08 | 4e-08 | 0.25 |
| layers.1.weight | L1 | 0 | 1 | 1e-08 | 4e-08 | 0.25 |
| layers.0.bias | L0 | 1 | 0 | 0 | 0 | 0 |
| layers.1.bias | L0 | 0 | 0 | 0 | 0 | 0 |
| layers.1.weight | L0 | 0 | 0 | 0 | 0 | 0 |

</details>

<details><summary>Buckets, in the order of reduction</summary>

| gradients | dtype | bucket | MiB |
| --- | --- | ---: | ---: |
| layers.1.weight, layers.1.bias | float32 | 0 | 4.000 |
| layers.0.weight, layers.0.bias | float32 | 1 | 1.000 |

</details>

- L2 needs Inductor, so it was not applied
""",
    )


def test_the_summary_of_many_trials() -> None:
    assert_expected_inline(
        folded(step_summary(matrix(("eager", "torch", "python-reducer"), 2, CASES[:2]))),
        """\
## :x: WRONG: matrix

On 2 ranks: 4 findings; of 12 trials 8 ok, 2 wrong, 2 not possible.

torch 2.13.0; ddpopt 0.1.0; python 3.11.2; device cpu; platform Linux

### W1: wrong, 2 trials

**L0 bitwise** does not hold: an aot\\_eager gradient equals eager's in every bit.

- linears: torch / option\\_00\\_with\\_a\\_name, aot\\_eager: layers.0.weight: expected eager's
    gradient, got one that is 512 ULPs away at \\[3, 4\\] (bucket 1, rank 1, step 2)
- gpt: torch / option\\_00\\_with\\_a\\_name, aot\\_eager: layers.0.weight: expected eager's gradient,
    got one that is 512 ULPs away at \\[3, 4\\] (bucket 1, rank 1, step 2)

**L3 structure** does not hold: every planned bucket is reduced exactly once per backward.

- linears: torch / option\\_00\\_with\\_a\\_name, aot\\_eager: bucket 1 was reduced 2 times in step 2 of
    rank 0, expected 1
- gpt: torch / option\\_00\\_with\\_a\\_name, aot\\_eager: bucket 1 was reduced 2 times in step 2 of rank
    0, expected 1

<details open><summary>What is not possible here, and why</summary>

- **n1**, 2 trials: python-reducer has no such option

</details>

| mode |  | ok | wrong | not possible | broken |
| --- | ---: | ---: | ---: | ---: | ---: |
| eager | a | 4 | - | - | - |
| torch, aot\\_eager | b | 2 | 2 | - | - |
| python-reducer, aot\\_eager | c | 2 | - | 2 | - |

<details><summary>case linears: of 6 trials 4 ok, 1 wrong, 1 not possible</summary>

| option | a | b | c |
| --- | ---: | ---: | ---: |
| option\\_00\\_with\\_a\\_name | ok | W1 | ok |
| option\\_01\\_with\\_a\\_name | ok | ok | n1 |

</details>

<details><summary>case gpt: of 6 trials 4 ok, 1 wrong, 1 not possible</summary>

| option | a | b | c |
| --- | ---: | ---: | ---: |
| option\\_00\\_with\\_a\\_name | ok | W1 | ok |
| option\\_01\\_with\\_a\\_name | ok | ok | n1 |

</details>
""",
    )


def test_a_reader_of_the_summary_sees_names_and_messages_as_they_are() -> None:
    trial = replace(
        wrong_trial(case=NASTY, mode=NASTY, option=NASTY),
        findings=(Finding("L0", NASTY, NASTY),),
        notes=(NASTY,),
    )
    made = verdict(trial, replace(impossible_trial(), reason=NASTY), target=NASTY)
    text = rendered(step_summary(made))
    shown = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("&quot;", '"')
    assert shown.count(NASTY) >= 8
    assert "<b>" not in text
    assert "<em>" not in text
    assert text.count("<td") == text.count("</td>")


def test_every_row_of_a_table_in_the_summary_has_as_many_cells_as_its_header() -> None:
    trial = replace(wrong_trial(), case=NASTY, mode=NASTY, option=NASTY, buckets=(), notes=())
    for made in (verdict(trial, ok_trial()), matrix(options=3), verdict(wrong_trial(), location=location())):
        for table in re.findall(r"<table>.*?</table>", rendered(step_summary(made)), re.DOTALL):
            header, *rows = (len(re.findall("<t[hd][ >]", row)) for row in table.split("<tr>")[1:])
            assert rows
            assert set(rows) == {header}


def test_a_stack_keeps_its_lines_and_cannot_end_its_block() -> None:
    reason = "rank 1 died\n\n  </pre># no heading\n| no | table |\n|---|---|"
    text = rendered(step_summary(verdict(replace(broken_trial(), reason=reason))))
    assert "<h1>" not in text
    assert "<table>" not in text
    assert "  &lt;/pre&gt;# no heading\n| no | table |" in text


def test_the_summary_of_the_largest_verdict_is_within_githubs_limit() -> None:
    made = matrix()
    wrong = replace(wrong_trial(), findings=wrong_trial().findings * 5000)
    assert len(step_summary(replace(made, trials=(*made.trials, wrong))).encode()) < 2**20 / 4


def test_a_wrong_trial_without_a_finding_is_told() -> None:
    bare = replace(wrong_trial(), findings=(), reason="it did not agree")
    assert [decoded(line)[1] for line in annotations(verdict(bare))] == [f"{bare.name}: it did not agree"]
    assert bare.status is Status.WRONG
    assert "it did not agree" in step_summary(verdict(bare))


def test_annotations_are_printed_and_the_summary_is_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "summary.md"
    file.write_text("before\n\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    write_github(all_kinds())
    assert capsys.readouterr().out.splitlines() == annotations(all_kinds())
    assert file.read_text(encoding="utf-8") == f"before\n\n{step_summary(all_kinds())}"


def test_outside_of_github_the_missing_summary_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    write_github(verdict(ok_trial()))
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "ddpopt: no step summary: GITHUB_STEP_SUMMARY is unset; GitHub sets it in each step\n",
    )


def test_a_summary_that_cannot_be_written_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    with pytest.raises(UsageError, match="which GITHUB_STEP_SUMMARY names: Is a directory; name a file"):
        write_github(verdict(ok_trial()))
