"""Locate the fault in a wrong step; `ddpopt.judge.locate` is the entry point.

`rungs` is the ladder of stages that a `search` climbs before it bisects the pieces that `pieces` compiles;
`known` is what the ranks report. `scripting` writes a script, and `reproduction` runs it.
"""
