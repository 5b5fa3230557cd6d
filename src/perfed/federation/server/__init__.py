"""The server: its clients, the rounds and the scores, and the checks of what clients send."""
