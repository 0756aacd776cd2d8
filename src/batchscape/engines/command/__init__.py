"""The engine that runs other people's programs."""
