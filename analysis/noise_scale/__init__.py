"""The gradient noise scale that training recorded: estimates with intervals, and what is shown."""
