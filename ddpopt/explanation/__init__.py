"""A plan, DDP's own buckets and torch's split side by side, as data and as text.

In: a model and its inputs, as for `ddpopt.plan`. Out: an `Explanation`. Torch's optimizer comes from
`ddpopt.dynamo`'s hook. Invariant: no process group, no accelerator and no training step is needed.
"""
