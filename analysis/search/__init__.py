"""The trials of a search: shown, and never estimated from."""
