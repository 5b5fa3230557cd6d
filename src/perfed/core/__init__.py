"""The ground that all rooms stand on: errors, random keys, trees, and one client's objective."""
