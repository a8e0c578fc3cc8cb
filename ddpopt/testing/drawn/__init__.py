"""Drawn models: small programs as values, printed as standalone modules, and run from that text.

Importing this package registers the blocks, simplest first.
"""

from importlib import import_module

from ddpopt.testing.drawn.model import DrawnModel, known_features
from ddpopt.testing.drawn.program import Program
from ddpopt.testing.drawn.registry import BLOCKS, Block, Step, step

__all__ = ["BLOCKS", "Block", "DrawnModel", "Program", "Step", "known_features", "step"]

for family in ("layers", "effects", "parameters", "spans", "crossings", "gradients", "writes", "outputs"):
    import_module(f"{__name__}.{family}")
