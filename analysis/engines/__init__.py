"""Training systems side by side: do they train alike, and what does each of them cost."""
