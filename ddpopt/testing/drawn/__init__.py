"""Drawn models: small programs as values, printed as modules that stand alone, and run from that text.

Importing this package registers the blocks that ship, the simplest first.
"""

from importlib import import_module

from ddpopt.testing.drawn.model import DrawnModel, known_features
from ddpopt.testing.drawn.program import Program
from ddpopt.testing.drawn.registry import (
    BLOCKS,
    KINDS,
    Block,
    Kind,
    Step,
    register_block,
    register_kind,
    step,
)
from ddpopt.testing.drawn.writer import LAYER, Body, Writer

__all__ = [
    "BLOCKS",
    "KINDS",
    "LAYER",
    "Block",
    "Body",
    "DrawnModel",
    "Kind",
    "Program",
    "Step",
    "Writer",
    "known_features",
    "register_block",
    "register_kind",
    "step",
]

for family in ("layers", "effects", "parameters", "spans", "crossings", "gradients", "writes", "outputs"):
    import_module(f"{__name__}.{family}")
