"""Start, feed, watch and stop the processes that are the ranks of a run.

In: a function and the number of ranks. Out: what each rank returned, or how it failed. Invariant: nothing
hangs, and no process outlives the run.
"""
