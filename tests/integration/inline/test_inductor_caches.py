"""What Inductor's caches on disk give back, in a process that may crash of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddpopt.ranks.environment import environment_of_no_rank

VIEWS = """
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ddpopt

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    def forward(self, x):
        made = self.first(x)
        one, other = made.flatten(1), made.flatten(1)[:, 1:]
        return self.second(x).flatten(1) * one, other.sin()

def sums(step):
    torch.autograd.backward(sum(value.sum() for value in step(torch.ones(2, 3, 8))))
    found = [parameter.grad.double().sum().item() for parameter in net.parameters()]
    net.zero_grad()
    return found

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = Net()
found = [sums(net)]
for _ in range(2):
    torch._dynamo.reset()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    found.append(sums(ddpopt.compile(ddp, strategy="split")))
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_views_that_leave_a_segment_come_back_whole_from_the_caches(tmp_path: Path) -> None:
    environment = {**environment_of_no_rank(), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", VIEWS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    # torch up to 2.13 writes garbage for their sizes, or crashes (pytorch#185630)
    eager, *starts = json.loads(done.stdout.splitlines()[-1])
    assert starts == [pytest.approx(eager, rel=1e-5)] * 2
