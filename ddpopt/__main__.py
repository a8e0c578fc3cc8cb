"""``python -m ddpopt``: the ``ddpopt`` command."""

from ddpopt.cli import main

main()
