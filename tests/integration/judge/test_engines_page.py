"""docs/engines.md: its code judges a right engine and a wrong one; here on one rank, in half the time."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


def test_the_page_judges_its_engines(tmp_path: Path) -> None:
    module, script = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "engine_page.py").write_text(module)
    (tmp_path / "script.py").write_text(script.replace('mode="whole"', 'mode="whole", nproc=1'))
    run = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"the gradient of \S+, .*: off by .* is allowed", run.stdout)
