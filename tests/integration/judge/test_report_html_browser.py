"""The HTML page in a real browser: it is drawn, it fits narrow and wide windows, and its filter filters."""

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from ddpopt.judge.report.html import html_page
from ddpopt.judge.verdict import Finding, SeenBucket, Verdict
from tests.unit.verdicts import (
    CASES,
    all_kinds,
    broken_trial,
    impossible_trial,
    location,
    matrix,
    ok_trial,
    verdict,
    wrong_trial,
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
RED, GREEN, WHITE, BLACK = (179, 38, 30), (23, 116, 74), (255, 255, 255), (20, 24, 29)
DARK = "--blink-settings=preferredColorScheme=0"
LONG = "module." * 40


@pytest.fixture
def browser() -> str:
    """Path of a Chromium or a Chrome; without one the tests are skipped, but not in CI."""
    found = filter(None, map(shutil.which, (os.environ.get("BROWSER_PATH", ""), *NAMES)))
    path = next(found, None)
    if path is None:
        missing = f"expected one of {', '.join(NAMES)} on PATH, found none; ci/browser.sh installs one"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return path


class Window:
    """A browser without a screen, with a profile of its own."""

    def __init__(self, path: str, folder: Path) -> None:
        self._folder = folder
        # As root there is no sandbox; a container's /dev/shm is often too small.
        self._command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        self._command += ["--hide-scrollbars", "--no-first-run", f"--user-data-dir={folder / 'profile'}"]

    def run(self, page: str, *options: str) -> subprocess.CompletedProcess[str]:
        file = self._folder / "page.html"
        file.write_text(page, encoding="utf-8")
        command = [*self._command, *options, file.as_uri()]
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100, check=True)

    def picture(self, page: str, *options: str) -> NDArray[np.uint8]:
        """What 1000 by 800 pixels show, as RGB."""
        file = self._folder / "picture.png"
        self.run(page, "--window-size=1000,800", f"--screenshot={file}", *options)
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))

    def ask(self, page: str, script: str) -> Any:
        """Run a function body in a page that has loaded, and return what it returns; errors fail."""
        probe = f"""<output id="answer"></output><script>
        addEventListener("load", () => {{
          document.getElementById("answer").textContent = JSON.stringify((() => {{ {script} }})());
        }});</script>"""
        probed = page.replace("</body>", f"{probe}</body>")
        run = self.run(probed, "--dump-dom", "--enable-logging=stderr", "--window-size=1000,800")
        assert "CONSOLE" not in run.stderr, run.stderr
        (answer,) = re.findall(r'<output id="answer">(.*?)</output>', run.stdout, re.DOTALL)
        return json.loads(html.unescape(answer))


@pytest.fixture
def window(browser: str, tmp_path: Path) -> Iterator[Window]:
    yield Window(browser, tmp_path)
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)


def share(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> float:
    return float((picture == np.array(colour, np.uint8)).all(axis=-1).mean())


def test_a_wrong_verdict_is_drawn_under_a_red_headline(window: Window) -> None:
    picture = window.picture(html_page(verdict(wrong_trial(), location=location())))
    assert picture.shape == (800, 1000, 3)
    head, body = picture[:100], picture[200:]
    assert share(head, RED) > 0.8
    assert share(head, WHITE) > 0.002  # the words on it
    assert share(body, WHITE) > 0.5
    assert share(body, GREEN) + share(body, RED) > 0.001
    assert len(np.unique(body.reshape(-1, 3), axis=0)) > 50


def test_a_right_verdict_is_drawn_green_on_black_where_the_reader_prefers_it_dark(window: Window) -> None:
    picture = window.picture(html_page(verdict(ok_trial())), DARK)
    assert share(picture[:100], GREEN) > 0.8
    assert share(picture[200:], BLACK) > 0.5
    assert share(picture, RED) == 0
    assert picture[200:].max() > 200  # light words


def long_names() -> Verdict:
    finding = Finding("L0", LONG, f"{LONG}\n{LONG}", parameter=LONG, bucket=0)
    buckets = (SeenBucket(0, (LONG,) * 2, 4, "float32"), SeenBucket(1, (LONG,) * 20, 4, "float32"))
    trial = wrong_trial(LONG, LONG, LONG)
    wrong = replace(trial, findings=(finding,), buckets=buckets, notes=(LONG,), backend=LONG)
    impossible = replace(impossible_trial(), reason=LONG)
    broken = replace(broken_trial(), reason=f"{LONG}\n{LONG}")
    place = replace(location(), layer=LONG, segments=(LONG,), script=LONG, note=LONG)
    made = verdict(wrong, impossible, broken, location=place, target=LONG)
    return replace(made, environment={"platform": LONG})


def test_no_page_is_wider_than_its_window(window: Window) -> None:
    pages = [html_page(made) for made in (all_kinds(), matrix(options=3), long_names())]
    frames = [
        f'<iframe width="{width}" height="600" srcdoc="{html.escape(page)}"></iframe>'
        for page in pages
        for width in (320, 700, 1280)
    ]
    script = """return [...document.querySelectorAll("iframe")].map((frame) => {
      const page = frame.contentDocument;
      page.querySelectorAll("details").forEach((each) => { each.open = true; });
      return [frame.clientWidth, page.documentElement.scrollWidth, page.querySelectorAll("section").length];
    });"""
    measured = window.ask(f"<!DOCTYPE html><body>{''.join(frames)}</body>", script)
    assert [width for width, _, _ in measured] == [320, 700, 1280] * 3
    assert all(sections >= 3 for _, _, sections in measured)
    assert [(width, inside) for width, inside, _ in measured if inside > width] == []


def test_the_filter_shows_the_trials_that_hold_every_word_and_have_a_ticked_status(window: Window) -> None:
    made = matrix(options=12, cases=CASES[:2])
    script = """
      const filter = document.getElementById("filter");
      const state = () => [
        document.querySelectorAll("#list tbody tr:not([hidden])").length,
        document.querySelectorAll(".grid:not([hidden]) tr:not([hidden]) td[data-trial]:not(.out)").length,
        document.querySelectorAll(".grid:not([hidden])").length,
        document.getElementById("shown").textContent,
      ];
      const type = (words) => {
        document.getElementById("words").value = words;
        filter.dispatchEvent(new Event("input"));
        return state();
      };
      const tick = (status) => filter.querySelector(`[value="${status}"]`).click();
      const seen = [state(), type("Torch  option_11"), type("gpt replicate"), type("nothing of this name")];
      type("");
      tick("ok");
      tick("not possible");
      seen.push(state());
      tick("ok");
      tick("not possible");
      seen.push(state());
      return seen;"""
    wrong = sum(trial.status == "wrong" for trial in made.trials)
    broken = sum(trial.status == "broken" for trial in made.trials)
    grave = wrong + broken
    assert (wrong, broken) == (4, 1)
    assert window.ask(html_page(made), script) == [
        [288, 288, 2, "288 trials"],
        [2, 2, 2, "2 of 288 trials"],
        [12, 12, 1, "12 of 288 trials"],
        [0, 0, 0, "0 of 288 trials"],
        [grave, grave, 2, f"{grave} of 288 trials"],
        [288, 288, 2, "288 trials"],
    ]
