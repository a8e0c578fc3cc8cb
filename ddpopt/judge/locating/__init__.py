"""Where a wrong step is wrong; `ddpopt.judge.locate` is the way in.

`rungs` is the ladder of stages that a `search` climbs, before it bisects the pieces that `pieces` compiles;
`known` is what ranks tell of it. `scripting` writes a script, and `reproduction` runs it.
"""
