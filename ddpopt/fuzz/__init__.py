"""Fuzzing: models are drawn, judged in worker processes, and what fails is kept and made small.

`campaign` is the way in for ``ddpopt fuzz``, `minimize` for ``ddpopt minimize``. `stream` draws models, and
`questions` is what is asked of one; `workers` has `worker` processes answer by `examine`; `signatures` tells
failures apart, `cases` are what is kept of them, `journal` is what a run that goes on reads, and `shared` the
database of several machines. `shrinking` lists what is smaller than a model, and `scripting` writes scripts.
"""
