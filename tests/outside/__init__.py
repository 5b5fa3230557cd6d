"""Methods as somebody else would write them: they use only what perfed makes public."""
