"""Judge requested trials, on ranks that are started here or by torchrun.

`runner` is the entry point. `attempts` starts ranks, and starts them again after a trial that ends them,
`on_rank` is what each rank does, and `judge` judges one mode against its reference.
"""
