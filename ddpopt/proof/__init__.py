"""What the certificate reads off graphs, and the invariants that it holds them to.

`terms` says what a value is, `steps` what a program is.
`recompose` inlines the segments again, and `evidence` gathers it all once. `program`, `memory` and `promises`
hold the invariants; `ddpopt.proof.certificate` is the table of these.

Invariant: nothing here is shared with what plans or cuts a graph, but the table `ddpopt.graph.effects`.
"""
