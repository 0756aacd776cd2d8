"""The gradient noise scale that training recorded: estimates with intervals, tables, charts."""
