"""Judge whether a way of running a data-parallel step computes what eager DDP computes.

In: a case, a mode, options and ranks. Out: a `Verdict` with findings, by derived tolerances. Invariant: what
was not judged is never called right.
"""
