"""How results are shown: as text, and as JUnit XML, HTML and Markdown.

In: a `Verdict`. Out: text, and the files that were requested. Invariant: every word can be reproduced from
the verdict's JSON, and the text is the same in every terminal and file.
"""
