"""Prove that a cut graph is the same program as the graph that it was cut from.

In: both graphs and the plan. Out: nothing, or a `CertificateError` with every violation. Invariant:
apart from the `Plan` it reads and `ddpopt.graph`'s facts about single nodes, it shares no code with planning
or cutting.

`evidence` reads both graphs once: `terms` defines values, `steps` defines programs, and `recompose` inlines
the segments again. `program`, `memory` and `promises` hold the invariants; `certificate` lists them.
"""
