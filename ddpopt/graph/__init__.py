"""Facts about FX graph nodes: what they read, write and alias, and in which grad and autocast state they run.

In: a graph as Dynamo captured it, with example values. Out: answers about its nodes. Invariant: an unknown
operator counts as a write to all of its inputs.
"""
