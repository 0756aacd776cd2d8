"""Plugins for Hydra, which imports this package in every application: no heavy imports."""
