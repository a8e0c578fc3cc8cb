"""Faults that verification puts in itself, layer by layer; `ddpopt.judge.faults` lists them.

`plans`, `graphs` (with `metadata`), `codes` and `wires` are the four layers: plan, partition, compiled
code, communication. `sites` puts a fault in and proves that it was, `trials` judges it, `clean_runs` puts
in none.
"""
