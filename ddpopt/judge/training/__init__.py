"""Train a few steps in one mode under one option, and record everything on which two modes must agree.

`train` is the entry point. `trainer` is one model in one mode, `options` are the ways to use DDP, `record`
keeps the results, and `visible` is what else a training script can see of a step.
"""
