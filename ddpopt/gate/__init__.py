"""The regression gate: measure figures that a change can make worse, and compare them with the baseline.

In: a baseline file. Out: the changes, and whether there are any. Each case is verified as well, and its
verdict is one of the figures. Invariant: equal code gives equal figures; nothing here reads a clock.
"""
