"""Cases: a model with its inputs and its loss. The corpus is the set of cases that ship.

In: a factory ``package.module:name``, or a name of the corpus. Out: a `Case`. Invariant: a case makes the
same model and the same inputs on every rank and in every process.
"""
