"""All that touches DDP's reducer: have it use a plan's buckets, ask what it holds, agree between ranks.

In: a DDP module and a plan. Out: a reducer whose buckets are the plan's, from the first step on, or an error
on every rank. Invariant: DDP is the authority; what is imposed is read back from it.
"""
