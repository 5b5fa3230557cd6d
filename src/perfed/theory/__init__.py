"""What the papers prove, as tools: constants of a federation, conditions, bounds, advice."""
