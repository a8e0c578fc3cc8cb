"""The rules and bounds by which a run's record is judged against eager's.

`bench` runs a subject on ranks, and `reference` is eager's side of it. `ladder` judges the numbers, with
`ddpopt.judge.compare` or with `arithmetic`, which uses the effects of rounding that `rounding` measures, and
collects the findings. `structure` judges everything that is not a number, from the evidence of all ranks;
`failing` describes how a run fails, and `refusals` lists all that a trial may be refused for.
"""
