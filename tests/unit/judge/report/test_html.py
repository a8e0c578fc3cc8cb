"""The HTML page as a document: well formed, with the whole verdict in it, loading and trusting nothing."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree.ElementTree import Element, TreeBuilder

import pytest

from ddpopt.judge.report.html import html_page
from ddpopt.judge.report.wording import WORDS, headline
from ddpopt.judge.verdict import Finding, Location, Measured, Rung, SeenBucket, Status, Trial, Verdict
from tests.support.verdicts import CASES, EVERY, impossible_trial, matrix, verdict

VOID = {"meta", "input", "br", "link", "img"}
NASTY = (
    """</style></script><script>alert("1")</script><b onload='x'>&amp; {{ 7 * 7 }} {% raw %} \N{SNOWMAN}"""
)


class Reader(HTMLParser):
    """Builds the tree of a page in which every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: TreeBuilder = TreeBuilder()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tree.start(tag, {name: value or "" for name, value in attrs})
        if tag in VOID:
            self.tree.end(tag)

    def handle_endtag(self, tag: str) -> None:
        assert (closed := self.tree.end(tag).tag) == tag, f"</{tag}> closes <{closed}>"

    def handle_data(self, data: str) -> None:
        self.tree.data(data)


def page_of(text: str) -> Element:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader.tree.close()


def texts(page: Element, tag: str, of_class: str = "") -> list[str]:
    """The text of elements, perhaps of one class."""
    found = [each for each in page.iter(tag) if of_class in ("", *each.get("class", "").split())]
    return [" ".join("".join(each.itertext()).split()) for each in found]


@pytest.mark.parametrize("made", EVERY)
def test_every_element_is_closed_and_every_link_leads_somewhere_in_the_page(made: Verdict) -> None:
    text = html_page(made)
    page = page_of(text)
    header = f"{WORDS[made.exit_code]} {made.target} {headline(made)}"
    assert texts(page, "header", f"exit-{made.exit_code}") == [header]
    tags = {each.tag for each in page.iter()}
    assert tags.isdisjoint({"link", "img", "iframe", "object", "embed", "base"})
    assert (len(made.trials) > 1) == ({"form", "script"} <= tags)
    ids = [each.attrib["id"] for each in page.iter() if "id" in each.attrib]
    assert len(ids) == len(set(ids))
    assert {each.get("href", "").removeprefix("#") for each in page.iter("a")} <= {*ids, ""}
    assert not any(each.attrib.keys() & {"src", "action"} for each in page.iter())
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in text


def test_every_text_is_escaped_and_shown_unchanged() -> None:
    finding = Finding(NASTY, NASTY, f"{NASTY}\nsecond line", parameter=NASTY, bucket=0, ulps=float("nan"))
    trial = Trial(
        *(NASTY, NASTY, NASTY, NASTY, Status.WRONG, NASTY, (finding,), (NASTY,), (NASTY,)),
        measured=(Measured(NASTY, NASTY, 0, float("inf"), float("nan"), 0.0, 0, 0),),
        buckets=(SeenBucket(0, (NASTY,) * 9, 4, NASTY),),
    )
    place = Location((Rung(NASTY, agrees=False, detail=NASTY),), NASTY, (NASTY,), NASTY, note=NASTY)
    made = verdict(trial, replace(impossible_trial(), reason=NASTY), location=place, target=NASTY)
    page = page_of(html_page(replace(made, environment={NASTY: NASTY})))
    assert not [each.tag for each in page.iter() if each.tag == "b" or "onload" in each.attrib]
    assert len(texts(page, "script")) == 1
    shown = " ".join(NASTY.split())
    assert texts(page, "h1") == [shown]
    assert texts(page, "li", "wrong") == [f"{shown} differs {shown}"]
    assert "".join(page.itertext()).count(NASTY) >= 20


def test_headers_have_a_scope_and_what_is_right_is_folded() -> None:
    def measured(name: str, error: float) -> Measured:
        return Measured(name, "L1", 0, 0.0, error, 1.0, 0, 0)

    trial = Trial(
        *("case", "mode", "option", "backend", Status.WRONG, "", (), (), ()),
        measured=(measured("right", 0.5), measured("wrong", 2.0)),
    )
    page = page_of(html_page(verdict(trial, *matrix(options=4).trials)))
    assert {each.get("scope") for each in page.iter("th")} == {"col", "row"}
    (details,) = [each for each in page.iter("details") if each.get("id") == "d0"]
    (folded,) = [each for each in details.iter("details") if each is not details]
    assert "open" not in folded.attrib
    assert texts(folded, "code") == ["right"]
    assert texts(details, "code") == ["wrong", "right"]


def test_every_trial_has_a_row_and_a_cell_that_leads_to_it() -> None:
    made = matrix(options=4)
    page = page_of(html_page(made))
    by_case = sorted(range(len(made.trials)), key=lambda index: CASES.index(made.trials[index].case))
    cells = [cell.get("data-trial") for cell in page.iter("td") if "data-trial" in cell.attrib]
    assert cells == [*map(str, by_case)]
    rows = [row.get("id") for row in page.iter("tr") if "id" in row.attrib]
    assert rows == [f"t{index}" for index in range(len(made.trials))]
