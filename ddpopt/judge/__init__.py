"""Judge whether a way of running a data-parallel step computes what eager DDP computes.

In: a case, a mode, options and ranks. Out: a `Verdict` with findings, based on derived tolerances. Eight
rooms, each of which imports only those before it:

- `engines`: the ways to run a data-parallel step;
- `training`: trains a few steps under an option, and records everything that a script can see;
- `rules`: eager's side, and the rules and bounds by which a record is judged;
- `simulation`: judges one mode on ranks that one process is in turn;
- `trajectory`: eager's free run over many steps, and how far a right run may be from it;
- `trials`: judges one mode after the other, on ranks that it starts;
- `locating`: finds where a wrong trial goes wrong, and writes a script that shows it.

`report` shows verdicts, and reads nothing else. All may import `compare` and `verdict`, which import none of
them. Invariant: nothing that was not judged is called right.
"""
