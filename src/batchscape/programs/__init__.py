"""Training programs of others: whether they can be started, their processes, what they log."""
