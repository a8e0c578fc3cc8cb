"""Locate the fault in a wrong step; `locate` is the entry point.

`rungs` lists the stages that `search` tries in turn, before it bisects the pieces that `pieces` compiles.
`scripting` writes a script from the template `reproduction.jinja`, and runs it once.
"""
