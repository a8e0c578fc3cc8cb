"""Everything that touches a DDP module: read its parameters and limits, set its buckets, keep ranks in agreement.

In: a DDP module and a plan. Out: a reducer whose buckets are the plan's; DDP's own, with the reason logged;
or an error. Invariant: DDP is the authority; imposed buckets are read back from it.
"""
