"""What torch's own tools show of a compilation: the log, the raw trace, and the page that tlparse makes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpopt.planning.plan import Plan
from ddpopt.proof.certificate import INVARIANTS
from tests.support.commands import python

PROGRAM = """
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from ddpopt.dynamo.backend import DdpoptBackend

class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x)

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
for strategy, cap_mb in (("split", 0.01), ("inline", 0.01), ("inline", 25)):
    ddp = DistributedDataParallel(Net(*(nn.Linear(64, 64) for _ in range(3))), bucket_cap_mb=cap_mb)
    torch.compile(ddp, backend=DdpoptBackend("eager", strategy))(torch.randn(2, 64)).sum().backward()
if torch.__version__ >= "2.13":
    import ddpopt

    @ddpopt.train_step(backend="eager")
    def step(x):
        ddp(x).sum().backward()

    step(torch.randn(2, 64))
distributed.destroy_process_group()
"""
SPLIT = "ddpopt_plan optimize_ddp_split_graph segment_0 segment_1 segment_2 ddpopt_proof"
SHOWN = [SPLIT, "ddpopt_plan ddpopt_inline_graph", "ddpopt_plan ddpopt_reason", "ddpopt_model_plan " * 3]
LOGGED = [
    "---ddpopt_original_graph---",
    "---ddpopt_buckets---",
    "bucket  bytes  parameters        why it ends there",
    "bucket 1 is complete: 1.weight brings it to",
    "= self.segment_0(",
    "---ddpopt_segment_2---",
    "it has a single bucket",
]
LINES = [
    "ddpopt: a graph with 3 buckets is cut into 3 segments",
    "ddpopt: bucket 0: 16640 bytes of float32: 2.bias, 2.weight; 2.weight brings it to 16640 bytes",
    "ddpopt: a graph with 3 buckets stays whole",
    "ddpopt: a graph with 1 bucket stays whole",
    *(["ddpopt: a graph with 1 bucket is a step"] if torch.__version__ >= "2.13" else []),
]


def of_ddpopt(trace: str) -> Iterator[tuple[str, object, str]]:
    """ddpopt's entries in a raw trace: name, compilation and text."""
    for text in trace.split("\nV"):
        line, _, payload = text.partition("\n")
        entry: dict[str, Any] = json.loads(line[line.index("{") :])
        kind = next(iter(entry))
        name = entry[kind].get("name", kind) if kind.startswith(("artifact", "optimize_ddp")) else ""
        if name.startswith(("ddpopt", "optimize_ddp", "segment")):
            compilation = entry.get("frame_id"), entry.get("frame_compile_id")
            yield name, compilation, "\n".join(row.removeprefix("\t") for row in payload.splitlines())


def test_each_compilation_shows_its_plan_its_graphs_and_the_proof(tmp_path: Path) -> None:
    done = python("-c", PROGRAM, TORCH_TRACE=str(tmp_path / "raw"), TORCH_LOGS="ddp_graphs")
    (raw,) = (tmp_path / "raw").iterdir()
    entries = [*of_ddpopt(raw.read_text())]
    shown: dict[object, list[str]] = {}
    for name, compilation, _ in sorted(entries, key=lambda entry: entry[1] == (None, None)):
        shown.setdefault(compilation, []).append(name)
    assert [*shown.values()] == [names.split() for names in SHOWN]
    texts = {name: text for name, _, text in entries}
    by_graph, joined = (
        [Plan.from_json(text) for name, _, text in entries if name == kind]
        for kind in ("ddpopt_plan", "ddpopt_model_plan")
    )
    assert by_graph == joined
    assert [(len(plan.buckets), len(plan.segments)) for plan in joined] == [(3, 3), (3, 1), (1, 1)]
    assert json.loads(texts["ddpopt_proof"]) == {"invariants": [*dict(INVARIANTS)], "violations": []}
    assert "self.segment_2(" in texts["optimize_ddp_split_graph"]
    assert "linear(" in texts["segment_1"]
    assert "lend(" in texts["ddpopt_inline_graph"]
    assert [line for line in LOGGED if line not in done.stderr] == []
    tlparse = Path(sys.executable).with_name("tlparse")  # it is in the extra "test"
    page = tmp_path / "page"
    subprocess.run([tlparse, raw, "-o", page, "--no-browser"], check=True, capture_output=True)
    index = (page / "index.html").read_text()
    files = [path for path in page.rglob("*_*.*") if "ddpopt_" in path.name or "_ddp_" in path.name]
    assert len(files) == len(entries)
    assert all(str(file.relative_to(page)) in index for file in files)


@pytest.mark.parametrize("shown", ["dynamo", "distributed", ""])
def test_each_graph_and_each_bucket_has_a_line_where_torch_logs_them(shown: str) -> None:
    done = python("-c", PROGRAM, TORCH_LOGS=shown)
    assert [line in done.stderr for line in LINES] == [bool(shown)] * len(LINES)
