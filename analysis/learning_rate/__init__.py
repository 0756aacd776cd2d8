"""The learning rate that each global batch wants: optima, laws, and what was not tuned."""
