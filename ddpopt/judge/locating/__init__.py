"""Where a wrong step is wrong; `ddpopt.judge.locate` is the way in.

`rungs` is the ladder of stages that a `search` climbs, `narrow` the bisection; `tries` is what its ranks do,
and `pieces` compiles the part that it chose. `scripting` writes a script (with `segment_code`), and
`reproduction` runs it.
"""
