"""The strategy ``split``: cut a graph where a plan's buckets end, and compile each segment on its own.

In: a graph and its plan. Out: a callable that runs the segments in turn. Invariant: the segments compute the
same as the graph, in the same order; `ddpopt.proof` checks this for every graph.
"""
