"""FedAvg rounds of perfed and of what one would use instead. Run with `make bench-peers`."""
