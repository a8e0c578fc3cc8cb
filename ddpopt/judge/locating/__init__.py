"""Where a wrong step is wrong; `ddpopt.judge.locate` is the way in.

`rungs` is the ladder of stages that a `search` climbs, `narrow` the bisection, and `pieces` compiles the
part that it chose; `known` is what ranks tell of it. `scripting` writes a script (with `segment_code`),
and `reproduction` runs it.
"""
