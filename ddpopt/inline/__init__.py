"""The strategy ``inline``: one graph, whose compiled backward hands each gradient to DDP as it completes.

In: a graph and its plan. Out: a callable with the same inputs and outputs. Invariant: each gradient reaches
its parameter exactly once, in memory that has a single owner.
"""
