"""What the server and its clients share: messages, errors, and which configurations can run."""
