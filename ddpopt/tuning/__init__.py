"""Choosing the buckets that make a training step shortest: profile, link, simulation, tuning.

In: real steps of a DDP module and all-reduces on its process group. Out: frozen records with units, a
predicted timeline, and a plan for `ddpopt.impose`. Invariant: what is tuned on one rank is equal on all.
"""
