"""The results of a step, and the rules and bounds by which `ddpopt.judge.judge` judges them.

`record` stores the numbers and the level at which each is judged. `ladder` judges them with
`ddpopt.judge.compare` or `arithmetic`, which uses the effects of rounding that `rounding` measures, and
collects the findings. `reference` is eager's side, `structure` judges everything that is not a number, from
the evidence of all ranks, and `failing` describes how a run fails.
"""
