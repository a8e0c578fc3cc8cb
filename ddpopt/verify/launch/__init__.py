"""Ranks: started or joined, told what to do, watched, and asked for what they saw.

`ddpopt.verify.ranks` is the way in. `start` starts them under torch's `agent`, each of them runs `process`,
and they share a `folder`; `marked` finds those that an aborted launch left. `limits` ends what takes too
long, `failures` says who failed of itself. `exchange` carries what ranks tell each other;
`attempts` and `lost` go on after ranks have died.
"""
