"""Observing training steps: buckets, collectives, their order, and compiled graphs.

In: a running DDP module. Out: frozen records. Invariant: observing changes neither results nor order.
"""
