"""Curves of loss, targets, and when each run reached them, censoring included."""
