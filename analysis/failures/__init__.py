"""Failures: attempts that did not complete, by what ended them, and what came of their runs."""
