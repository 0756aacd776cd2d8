"""Failures: attempts that did not finish, by what ended them, and what came of their runs."""
