"""Cases: a model with its inputs and its loss. The corpus is the set of cases that ship with ddpopt.

In: a factory ``package.module:name``, or the name of a case in the corpus. Out: a `Case`. Invariant: a case
makes the same model and the same inputs on every rank and in every process.
"""
