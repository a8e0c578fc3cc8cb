"""What one step left, and the rules and bounds by which `ddpopt.judge.judge` judges it.

A `record` holds numbers, each with its levels. `ladder` judges them, by `ddpopt.judge.compare` or by
`arithmetic`, which needs to know what `rounding` does, and collects what was found. `reference` is eager's
side, `structure` holds what is no number, by the evidence of all ranks, and `failing` tells how a run fails.
"""
