"""The HTML page as a document: well formed, with the whole verdict in it, loading and trusting nothing."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ddpopt.judge.report.html import html_page
from ddpopt.judge.report.wording import WORDS, headline
from ddpopt.judge.verdict import Finding, Location, Measured, Rung, SeenBucket, Status, Trial, Verdict
from tests.unit.verdicts import CASES, EVERY, impossible_trial, matrix, verdict

VOID = {"meta", "input", "br", "link", "img"}
NASTY = (
    """</style></script><script>alert("1")</script><b onload='x'>&amp; {{ 7 * 7 }} {% raw %} \N{SNOWMAN}"""
)


class Page(HTMLParser):
    """A page as a list of elements, each with its attributes and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1][0] == tag, f"</{tag}> closes <{self.open[-1][0]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def found(self, tag: str, of_class: str = "") -> Iterator[str]:
        """The text of elements, perhaps of one class."""
        for name, attributes, text in self.elements:
            if name == tag and of_class in ("", *attributes.get("class", "").split()):
                yield " ".join("".join(text).split())

    def attributes(self, tag: str, name: str) -> list[str]:
        return [
            attributes[name] for found, attributes, _ in self.elements if found == tag and name in attributes
        ]


@pytest.mark.parametrize("made", EVERY)
def test_every_element_is_closed_and_every_link_leads_somewhere_in_the_page(made: Verdict) -> None:
    text = html_page(made)
    page = Page(text)
    assert page.open == []
    (header,) = page.found("header", f"exit-{made.exit_code}")
    assert header == f"{WORDS[made.exit_code]} {made.target} {headline(made)}"
    tags = {tag for tag, _, _ in page.elements}
    assert tags.isdisjoint({"link", "img", "iframe", "object", "embed", "base"})
    assert (len(made.trials) > 1) == ({"form", "script"} <= tags)
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {href.removeprefix("#") for href in page.attributes("a", "href")} <= set(ids)
    assert not any(name in attributes for _, attributes, _ in page.elements for name in ("src", "action"))
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in text


def nasty() -> Verdict:
    finding = Finding(NASTY, NASTY, f"{NASTY}\nsecond line", parameter=NASTY, bucket=0, ulps=float("nan"))
    trial = Trial(
        *(NASTY, NASTY, NASTY, NASTY, Status.WRONG, NASTY, (finding,), (NASTY,), (NASTY,)),
        measured=(Measured(NASTY, NASTY, 0, float("inf"), float("nan"), 0.0, 0, 0),),
        buckets=(SeenBucket(0, (NASTY,) * 9, 4, NASTY),),
    )
    place = Location((Rung(NASTY, agrees=False, detail=NASTY),), NASTY, (NASTY,), NASTY, note=NASTY)
    made = verdict(trial, replace(impossible_trial(), reason=NASTY), location=place, target=NASTY)
    return replace(made, environment={NASTY: NASTY})


def test_every_text_is_escaped_and_shown_unchanged() -> None:
    page = Page(html_page(nasty()))
    assert page.open == []
    assert {tag for tag, _, _ in page.elements}.isdisjoint({"b"})
    assert len(list(page.found("script"))) == 1
    assert not any("onload" in attributes for _, attributes, _ in page.elements)
    shown = " ".join(NASTY.split())
    assert list(page.found("h1")) == [shown]
    assert list(page.found("li", "wrong")) == [f"{shown} differs {shown}"]
    assert "".join(page.elements[0][2]).count(NASTY) >= 20


def test_every_trial_has_a_row_and_a_cell_that_leads_to_it() -> None:
    made = matrix(options=4)
    page = Page(html_page(made))
    by_case = sorted(range(len(made.trials)), key=lambda index: CASES.index(made.trials[index].case))
    assert page.attributes("td", "data-trial") == [str(index) for index in by_case]
    assert page.attributes("tr", "id") == [f"t{index}" for index in range(len(made.trials))]
