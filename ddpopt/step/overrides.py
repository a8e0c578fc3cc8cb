"""Parts of a step that are kept out of its graph, and the user's own pass over the graph.

Invariant: a pass changes how a step is computed, never its inputs, outputs or collectives unnoticed.
"""
