"""What all commands share to show results: tables, a status line, and files by their suffix.

In: text and rows of cells. Out: text on stdout, files that were requested, and progress on stderr. Invariant:
stdout has only results.
"""
