"""How results are shown: plain text here, the same in every terminal and file."""
