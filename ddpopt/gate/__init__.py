"""The regression gate: measure what a change can make worse, and compare it with the baseline.

In: a baseline file. Out: the changes, and whether they pass. Invariant: equal code gives equal figures.
"""
