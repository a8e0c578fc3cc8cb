"""``python -m ddpopt``: the ``ddpopt`` command."""

import os
import sys

# a file in the current folder must not hide a package that is imported here
sys.path.sort(key=lambda entry: entry in ("", os.getcwd()))

from ddpopt.cli.app import main

main()
