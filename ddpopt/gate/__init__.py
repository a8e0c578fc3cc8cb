"""The gate: what a commit must leave as it was, or change in sight of a reviewer.

`figures` holds what is compared, `baseline` keeps it in a file, `bands` says how far a figure may stray.
`plans`, `runs` (with `potential`), `ratios` and `collected` each measure one thing; `measuring` has all of it
done, on ranks of its own or on those that are there. `changes` compares, `buckets`
does so for bucket tables; `moved` is one thing that moved, and `comparison` is what the reports take.
"""
