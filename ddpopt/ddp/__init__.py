"""Everything that touches DDP's reducer: make it use a plan's buckets, query it, agree between ranks.

In: a DDP module and a plan. Out: a reducer whose buckets are the plan's, from the first step on, or an error
on every rank. Invariant: DDP is the authority; imposed buckets are read back from it.
"""
