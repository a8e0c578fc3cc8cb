"""Each example of docs/frameworks.md on two ranks: equal to eager DDP, and really through ddpopt."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.commands import TWO_RANKS, python

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
FRAMEWORKS = {
    "transformers_gpt2": "transformers",
    "transformers_trainer": "accelerate",  # without which the Trainer does not start
    "accelerate_loop": "accelerate",
    "fabric_loop": "lightning",
    "lightning_trainer": "lightning",
}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("example", FRAMEWORKS)
def test_an_example_trains_as_in_eager_and_through_ddpopt(example: str, backend: str) -> None:
    if importlib.util.find_spec(FRAMEWORKS[example]) is None:
        pytest.skip(f"{FRAMEWORKS[example]} is missing: pip install .[integrations]")
    words = "tests/integration/frameworks/watched.py", f"examples/{example}.py", backend
    done = python(*TWO_RANKS, *words, folder=ROOT, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal to eager: yes") == 1, done.stdout
    assert done.stdout.count("modules: EAGER, FOLLOWED\n") == 2, done.stdout


def test_each_command_and_recipe_of_the_page_is_one_of_an_example() -> None:
    ran = re.findall(r"torchrun --nproc-per-node 2 examples/(\w+)\.py", PAGE)
    assert ran == [*FRAMEWORKS]
    sections = PAGE.split("\n## ")[1 : len(ran) + 1]
    for example, section in zip(ran, sections, strict=True):
        text = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
        code = {re.sub(r"\s+", "", line) for line in text.splitlines()}
        (recipe,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        assert {re.sub(r"\s+", "", line) for line in recipe.splitlines()} <= code
