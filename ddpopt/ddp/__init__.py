"""Everything that touches DDP's reducer: set its buckets, query it, and keep the ranks in agreement.

In: a DDP module and a plan. Out: a reducer whose buckets are the plan's; DDP's own, with the reason logged;
or an error. Invariant: DDP is the authority; imposed buckets are read back from it.
"""
