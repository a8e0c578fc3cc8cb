"""From a graph and DDP's options to a plan: which gradients are reduced in which all-reduce, and why.

In: forward graphs with their example values, DDP's parameters and bucket limits. Out: a frozen `Plan`.
Invariant: planning runs nothing and changes nothing; equal inputs give equal plans on every rank.
"""
