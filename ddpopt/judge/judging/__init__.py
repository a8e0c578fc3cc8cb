"""The results of a step, and the rules and bounds by which `ddpopt.judge.judge` judges them.

A `record` holds numbers, each with its levels. `ladder` judges them with `ddpopt.judge.compare` or
`arithmetic`, which uses the effects of rounding that `rounding` measures, and collects the findings.
`reference` is eager's side, `structure` judges everything that is not a number, from the evidence of all
ranks, and `failing` describes how a run fails.
"""
