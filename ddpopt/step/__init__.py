"""The strategy step: forward, loss, backward, all-reduces and optimizer of a train step in one graph.

Import what you need from the modules; ``ddpopt.train_step`` is the public name.
"""
