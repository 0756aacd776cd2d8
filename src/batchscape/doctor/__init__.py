"""`batchscape doctor`: what this machine has, what is missing, and how to repair it."""

# Nothing is imported here: the children of the examination start as fast as they can.
