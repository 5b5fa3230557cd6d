"""The network: Flower's programs and calls, keys, and the port that clients connect to."""
