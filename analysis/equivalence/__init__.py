"""Whether decompositions of one global batch train alike."""
