"""What the server and its clients have in common: messages, errors, what can be federated."""
