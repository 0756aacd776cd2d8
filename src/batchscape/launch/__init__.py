"""Running the cells of a sweep: processes, devices, and how each run ended."""
