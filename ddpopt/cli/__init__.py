"""The commands: options in, text and exit code out; the other packages do the work.

Invariant: an exit code means the same in every command: 0 right, 1 wrong, 2 usage, 3 not judged.
"""
