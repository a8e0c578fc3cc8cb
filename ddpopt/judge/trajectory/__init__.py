"""Many steps, each from where the last one ended: whether a drift from eager is rounding, or a bug.

Built on `ddpopt.judge.rules`, and not on the ladder: eager's own runs on data that rounding cannot tell apart
show how far a right run may drift.
"""
