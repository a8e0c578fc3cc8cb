"""What people build tests of data-parallel models from: cases, and the corpus of those that ship."""

from ddpopt.testing.case import Case, mean_square, resolve, step_seed

__all__ = ["Case", "mean_square", "resolve", "step_seed"]
