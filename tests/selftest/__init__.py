"""The test of the verification itself, ``make self-test``: faults are put into running training.

`faults` lists them. `plans`, `graphs` (with `metadata`), `codes` (with `shown`) and `wires` are the layers
plan, partition, compiled code and communication; `defects` are put back into ddpopt. `sites` puts a fault in
and proves that it was, `trials` judges it, `clean_runs` lists runs without one.
"""
