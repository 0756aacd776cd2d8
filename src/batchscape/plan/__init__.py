"""Before a launch: cells, geometries, names, and what this machine can hold."""
