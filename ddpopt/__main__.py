"""``python -m ddpopt``: the ``ddpopt`` command."""

from ddpopt.cli.app import main

main()
