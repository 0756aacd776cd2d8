"""The configuration files of other training systems: written from one geometry, or checked."""
