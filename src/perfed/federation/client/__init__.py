"""A client: its folder, its replies to the server, and the SuperNode that connects it."""
