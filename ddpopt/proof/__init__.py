"""Prove that a cut graph is the same program as the graph that it was cut from.

In: both graphs and the plan. Out: nothing, or a `CertificateError` with every violation. Invariant: shares no
code with planning and cutting, except what `ddpopt.graph` says about a single node.

`evidence` reads both graphs once: `terms` defines values, `steps` defines programs, and `recompose` inlines
the segments again. `program`, `memory` and `promises` hold the invariants; `certificate` lists them.
"""
