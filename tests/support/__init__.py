"""What several tests share: models, graphs, runs, and the words in which results are held.

A helper of one file is in that file. Faults that test the judge are in `tests.selftest`.
"""
