"""Facts about FX graph nodes: what they read, write and alias, and under which grad mode and autocast state.

In: a graph as Dynamo captured it, with example values. Out: answers about its nodes. Invariant: an unknown
operator counts as a write to all of its inputs.
"""
