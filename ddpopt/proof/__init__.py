"""Prove that a cut graph is the same program as the graph that it was cut from.

In: both graphs and the plan. Out: nothing, or a `CertificateError` with every violation. Invariant: nothing
is shared with what plans or cuts a graph, except what `ddpopt.graph` says of a single node.

`evidence` reads both graphs once: `terms` says what a value is, `steps` what a program is, and `recompose`
inlines the segments again. `program`, `memory` and `promises` hold the invariants; `certificate` lists them.
"""
