"""A worker's process: ``python -m ddpopt.fuzz.worker_process PIPE RANK SIZE STORE LOG``.

It stands apart from `ddpopt.fuzz.worker`, so that what travels through the pipe has one name on both sides.
"""

import sys
from multiprocessing.connection import Connection

from ddpopt.fuzz.worker import Seat, serve

if __name__ == "__main__":
    serve(Seat.of(sys.argv[2:]), Connection(int(sys.argv[1])))
