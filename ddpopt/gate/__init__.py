"""The regression gate: measure what a change can make worse, and compare it with the baseline.

In: a baseline file. Out: the changes, and whether there are any. Invariant: equal code gives equal figures;
nothing here reads a clock.
"""
