"""Judge whether a way of running a data-parallel step computes what eager DDP computes.

In: a case, a mode, options and ranks. Out: a `Verdict` with findings, based on derived tolerances. Steps run
on `ranks` and are recorded by `observation`; to locate a fault, graphs are cut by `split`. Invariant: nothing
that was not judged is called right.
"""
