"""Where ranks hang: what each rank's flight recorder says that it sent, compared.

In: dumps of torch's flight recorder, one for each rank. Out: the first collective in which ranks differ, who
is missing, and the line of the user's code on each. Invariant: a dump is data, and nothing in it is run.
"""

from ddpopt.hang.diagnosis import Hang, diagnose
from ddpopt.hang.flights import Flight, RecordedCollective, read
from ddpopt.hang.recorder import recording, save

__all__ = ["Flight", "Hang", "RecordedCollective", "diagnose", "read", "recording", "save"]
