"""The entry points from torch.compile: the backend, `ddpopt.compile`, and the hook on torch's DDPOptimizer.

In: the graphs that Dynamo captures. Out: callables, from the strategy that fits each graph. Invariant: if
ddpopt cannot help, a graph is compiled whole, and the reason is logged once.
"""
