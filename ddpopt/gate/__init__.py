"""The regression gate: measure figures that a change can make worse, and compare them with the baseline.

In: a baseline file. Out: the changes, and whether there are any. Invariant: equal code gives equal figures;
nothing here reads a clock.
"""
