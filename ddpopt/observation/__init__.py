"""Observing training steps: buckets, collectives, their order, and compiled graphs.

In: a running DDP module. Out: frozen records. It wraps `inline`'s operator, too, and asks `planning` which
parameters a reducer has. Invariant: observing changes neither results nor order.
"""
