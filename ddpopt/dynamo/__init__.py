"""The way in from torch.compile: the backend, `ddpopt.compile`, and the hook on torch's own DDPOptimizer.

In: the graphs that Dynamo captures. Out: callables, from the strategy that fits each graph. Invariant: where
ddpopt cannot help, a graph is compiled whole, and the reason is logged once.
"""
