"""The best global batch and learning rate together, and how they grow with the horizon."""
