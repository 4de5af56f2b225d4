"""Readers and scoring for in-context retrieval-augmented language modelling, in JAX."""

__version__ = "0.1.0"
