"""What every stage asks of FX graphs; imports nothing else of ddpopt but `ddpopt.graph.nodes`."""
