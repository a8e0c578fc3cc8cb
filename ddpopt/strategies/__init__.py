"""What the strategies for a captured graph have in common: three questions, and contexts to compile in.

In: a captured graph, and strategies in the order in which they are preferred. Out: a planned graph, from the
first strategy that can take it. Invariant: for the same graph, `ddpopt.plan` and compilation choose the same
strategy.
"""
