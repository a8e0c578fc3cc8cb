"""Search for models that a mode gets wrong: draw them, judge them, and minimize the failures.

In: modes, a backend and a time limit. Out: failures as data, and a script for each. Invariant: a failure
counts against a mode only where the backend without any optimizer is right.
"""
