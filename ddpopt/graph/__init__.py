"""What FX graphs say: what a node reads, writes and aliases, and in which grad and autocast state it runs.

In: a graph as Dynamo captured it, with example values. Out: answers about its nodes. Invariant: an operator
that is not known counts as a write to all of its inputs.
"""
