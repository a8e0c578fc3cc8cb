"""Write scripts that show a failure: with torch alone if the fault is torch's own.

They judge like `ddpopt.judge.compare`.
Invariant: a script for a torch fault imports only torch and the standard library.
"""

from pathlib import Path
from typing import Any

import torch

from ddpopt.fuzz.cases import FoundCase, write_whole
from ddpopt.judge.locating.scripting import REACHED, command_of, rendered
from ddpopt.judge.rules.arithmetic import CREDIBLE
from ddpopt.judge.rules.factors import centered_factor, tail_factor
from ddpopt.judge.rules.outcome import EXACT
from ddpopt.judge.rules.rounding import SAMPLES
from ddpopt.judge.training.updating import LEARNING_RATE

FIRST_BUCKET_BYTES = 2**20
"""DDP's default; torch's optimizer takes no smaller cap."""
GRADIENTS = "a gradient wherever eager DDP has one"
GRAPHS = "as many graphs as for the model alone"
"""Claims about structure that a script can show without ddpopt."""
IMPORTS = ("import ", "from ")
SECTIONS = ("\n\ndef run_step(", "\n\nDDP_KWARGS =", "\n\nif __name__")


def save(case: FoundCase, folder: Path) -> None:
    """Write a case, and a script that shows it, into a folder."""
    file = folder / f"{case.stem}.json"
    script = file.with_suffix(".py")
    write_whole(script, script_of(case, script.name))
    write_whole(file, case.to_json())


def script_of(case: FoundCase, name: str) -> str:
    """Write a script that exits with 1 while a failure exists, and with 0 once it is gone.

    Args:
        case: the failure.
        name: name of the script's file.

    Returns:
        The script. It uses torch alone if the fault is torch's own; ddpopt judges its own faults, and
        findings on buckets and collectives.
    """
    kind = case.signature.kind
    counts = case.signature.what == GRAPHS
    symptom = {"error": "run", "death": "died", "no end": "died"}.get(kind, "graphs" if counts else "")
    alone = (
        case.is_torchs
        and case.model.training == "default"
        and (kind != "L3" or case.signature.what in (GRADIENTS, GRAPHS))
    )
    limit = case.owner_mode == "torch" and case.setting.lowers_limit
    cap = case.model.cap_bytes
    samples = not symptom and case.setting.backend not in EXACT
    imports, definitions = _definitions(case.model.source, whole=not alone)
    given: dict[str, Any] = {
        "headline": _headline(case),
        "about": [line.replace('"""', "'''").replace("\\", "/") for line in case.about.splitlines()],
        "torch_version": case.torch or torch.__version__,
        "ranks": case.setting.nproc,
        "compiler": repr(case.setting.backend),
        "command": f"'{command_of(case.setting.nproc)} {name}'",
        "death": case.signature.what if kind == "death" else "",
        "reached": REACHED,
        "symptom": symptom,
        "imports": sorted(
            {*imports, *_imports(symptom, alone, samples, case.setting.nproc)},
            key=lambda line: (line.startswith("from"), line),
        ),
        "limit": cap if limit and cap < FIRST_BUCKET_BYTES else 0,
        "source": definitions,
        "steps": case.setting.steps,
    }
    if alone:
        known = tail_factor(SAMPLES)  # one more error may exceed eager's own by so much
        given |= {
            "mode_of_ddp": case.owner_mode,
            "ddp_kwargs": dict(case.model.program.module.DDP_KWARGS),
            "learning_rate": LEARNING_RATE,
            "exact": not samples,
            "samples": samples,
            "factor": round(known, 1),
            "centered_factor": round(centered_factor(SAMPLES), 1),
            "credible": round(CREDIBLE * known),
        }
    else:
        given |= {"name": case.stem, "mode": case.owner_mode, "training": case.model.training}
    return rendered("model.jinja" if alone else "judged.jinja", given, "fuzz/scripts")


def _headline(case: FoundCase) -> str:
    who = {
        "torch": "torch.compile of a DDP module, with torch's DDPOptimizer,",
        "whole": "torch.compile of a DDP module, without any optimizer,",
    }.get(case.owner_mode, f"The data-parallel mode {case.mode}")
    match case.signature.kind:
        case "death":
            return f"{who} crashes the process ({case.signature.what})."
        case "no end":
            return f"{who} does not end."
        case "error":
            return f"{who} fails where eager DDP runs ({case.signature.what})."
        case "L3":
            return f"{who} breaks a rule: {case.signature.what}."
    return f"{who} does not compute what eager DDP computes ({case.signature.what})."


def _imports(symptom: str, alone: bool, samples: bool, ranks: int) -> list[str]:
    """What the script imports, in addition to the model."""
    found = ["import sys", "import torch", *(["import os"] if ranks > 1 else [])]
    if not alone:
        return [
            *found,
            "import torch.distributed as dist",
            "from dataclasses import replace",
            "from ddpopt.cases.case import Case",
            "from ddpopt.judge.trials.runner import verify_here",
        ]
    found += ["import traceback"] if symptom == "run" else []
    found += ["from torch.utils._pytree import tree_map"] if samples else []
    return [*found, "from torch.nn.parallel import DistributedDataParallel"]


def _definitions(source: str, *, whole: bool) -> tuple[list[str], str]:
    """The imports of a model's source, and the part of it that makes the model, its inputs and its loss."""
    lines = source.partition('"""\n\n')[2].splitlines()
    count = next(index for index, line in enumerate(lines) if line and not line.startswith(IMPORTS))
    imports = [line for line in lines[:count] if line]
    body = "\n".join(lines[count:])
    text, _, rest = body.partition(SECTIONS[0])
    kwargs = rest.partition(SECTIONS[1])[2].partition(SECTIONS[2])[0]
    return imports, f"{text.rstrip()}\n\n\nDDP_KWARGS ={kwargs.rstrip()}" if whole else text.rstrip()
