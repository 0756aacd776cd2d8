"""Models: the smallest honest workloads, and the doors to the user's own."""
