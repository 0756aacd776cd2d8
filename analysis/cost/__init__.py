"""What an optimizer step costs: memory, time and what more devices gain, from measurements."""
