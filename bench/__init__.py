"""How fast a round is, against what one would write instead. Run with `make bench`."""
