"""Judge a case on any number of ranks in one process, which runs them one after the other.

What a rank computes before its gradients are reduced does not depend on what the reduction returns. So one
model, in a process group that sends nothing, can be each rank in turn: `world` is that group, `shared_model`
the model in it, `sequences` compares what the ranks would send, `causes` says why one would send something
else, and `simulate` puts them together. Invariant: what depends on a value that another rank would have sent
is never called right.
"""
