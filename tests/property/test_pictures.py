"""Trace, page and text show the times of their timelines; a link on paper follows the formulas."""

import json
import os
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.planning.bucket_rule import own_buckets
from ddpopt.planning.limits import BucketConfig
from ddpopt.tuning.pictures import chrome_trace, page, svg, text
from ddpopt.tuning.records import Gradient, Link, Profile, ms
from ddpopt.tuning.scale import scaled, steps_of
from ddpopt.tuning.simulate import Timeline, simulate
from ddpopt.tuning.tune import plan_of, tune
from tests.support.drawn_profiles import gradients, links, step_of, times
from tests.support.profiles import share

DOCS = Path(__file__).parents[2] / "docs"


@st.composite
def steps(draw: st.DrawFn) -> Timeline:
    drawn = [replace(each, spec=replace(each.spec, dtype="float32")) for each in draw(gradients(40))]
    ends = [0, *sorted(draw(st.sets(st.integers(1, len(drawn))))), len(drawn)]
    groups = [drawn[begin:end] for begin, end in pairwise(ends) if begin < end]
    profile = Profile(tuple(drawn), draw(times), drawn[-1].ready_s + draw(times), draw(times), "eager", 2, {})
    return step_of(groups, profile, draw(links))


@given(steps(), steps())
def test_a_trace_has_all_buckets_and_what_nothing_covers(predicted: Timeline, observed: Timeline) -> None:
    events = json.loads(chrome_trace(predicted, [observed, predicted]))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            rows[f"{e['pid']} {names[e['pid'], e['tid']]}"].append((e["name"], e["ts"], e["ts"] + e["dur"]))
    for row, step in {"0 predicted": predicted, "0 observed": observed, "1 observed": predicted}.items():
        network = [span for span in rows[f"{row} network"] if span[0] != "exposed"]
        at = [[round(s * 1e6) for s in (each.ready_s, each.sent_s, each.back_s)] for each in step.buckets]
        assert network[: len(at)] == [(f"bucket {i}", sent, back) for i, (_, sent, back) in enumerate(at)]
        assert all(a[2] <= b[1] for a, b in pairwise(network))
        assert [end for _, _, end in rows[f"{row} buckets"]] == [ready for ready, _, _ in at]
        busy = [span[1:] for span in rows[f"{row} compute"] if span[0] != "waiting"]
        gaps = pairwise([(0, 0), *busy, (round(step.step_s * 1e6),) * 2])
        idle = [(a[1], b[0]) for a, b in gaps if a[1] < b[0]]
        assert sum(end - begin for begin, end in idle) == pytest.approx(step.exposed_s * 1e6, abs=2)
        alone = [(max(b, i), min(e, j)) for _, b, e in network for i, j in idle if max(b, i) < min(e, j)]
        assert [span[1:] for span in rows[f"{row} network"] if span[0] == "exposed"] == alone


@share(0.2)
@given(st.dictionaries(st.text("<&>\"' a/", min_size=1), steps(), min_size=1, max_size=3))
def test_a_page_is_well_formed_loads_nothing_and_names_each_bucket(drawn: dict[str, Timeline]) -> None:
    made = page("<title\x01>", drawn, "a & b")
    assert not re.search(r"url\(|@import|<script|<link|<img| src=| href=", made)
    words = {each.text for each in ElementTree.fromstring(made).iter()}
    for name, step in drawn.items():
        assert f"{ms(step.exposed_s)} exposed" in words
        assert any(word and word.startswith(f"{name}: {ms(step.step_s)}") for word in words)
        for sent in step.buckets:
            assert re.search(rf"<title>bucket {sent.index}, .*\({sent.nbytes:,} bytes\): ", made)


@share(0.5)
@given(st.dictionaries(st.text("ab ", min_size=1, max_size=20), steps(), min_size=1, max_size=3))
def test_text_is_ascii_and_narrow_and_marks_what_is_exposed(drawn: dict[str, Timeline]) -> None:
    lines = text(drawn).splitlines()
    assert max(map(len, lines)) <= 60
    assert text(drawn).isascii()
    networks = [line for line in lines if line.startswith("network")]
    assert [("#" in line) for line in networks] == [step.exposed_s > 0 for step in drawn.values()]


@given(links, st.integers(2, 64), st.sampled_from([4, 512, 4096]), st.integers(1, 10**9))
def test_a_tree_wins_below_the_crossover_and_the_measured_link_is_a_ring(
    drawn: Link, measured: int, size: int, nbytes: int
) -> None:
    link = Link(drawn.latency_s + 0.1, drawn.seconds_per_byte + 0.1, 0.1, 1.0, 0.0, "gloo", measured, {})
    assert scaled(link, measured) == link
    ring, tree = scaled(link, size).cost_s(nbytes), scaled(link, size, "tree").cost_s(nbytes)
    hop_s, byte_s = link.latency_s / (measured - 1), link.seconds_per_byte * measured / (measured - 1)
    crossover = (size - 1) * hop_s / byte_s
    assert nbytes == pytest.approx(crossover) or (tree < ring) == (nbytes < crossover)


@share(0.3)
@given(gradients(), links, st.integers(2, 100))
def test_a_tuned_step_on_more_ranks_takes_no_less(drawn: list[Gradient], link: Link, size: int) -> None:
    profile = Profile(tuple(drawn), 1.0, drawn[-1].ready_s, 1.0, "eager", 2, {})
    ends = [step.step_s for step in steps_of(profile, link, sorted({2, size, size + 1, 4096})).values()]
    assert all(a <= b * (1 + 1e-5) for a, b in pairwise(ends))


def test_the_picture_of_the_page_is_what_the_code_draws() -> None:
    stored = (DOCS / "data/tuning.json").read_text()
    profile, link = Profile.from_json(stored), Link.from_json(stored)
    shown, specs = {}, [gradient.spec for gradient in profile.gradients]
    for name, cap in {"DDP's default": None, "bucket_cap_mb=3": 3}.items():
        buckets = own_buckets(specs, specs, BucketConfig.from_kwargs(bucket_cap_mb=cap))
        shown[name] = simulate(plan_of(buckets, name), profile, link)
    shown["tuned"] = simulate(tune(profile, link), profile, link)
    picture = DOCS / "diagrams/tuning.svg"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        picture.write_text(svg(shown))
    assert picture.read_text() == svg(shown)
    printed = text({"explained": shown["DDP's default"], "tuned": shown["tuned"]})
    assert printed in (DOCS / "tuning.md").read_text()
