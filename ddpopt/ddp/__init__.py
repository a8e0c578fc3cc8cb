"""Everything that touches a DDP module: its parameters, limits and buckets, and what ranks agree on.

In: a DDP module and a plan. Out: a reducer whose buckets are the plan's; DDP's own, with the reason logged;
or an error. Invariant: DDP is the authority; imposed buckets are read back from it.
"""
