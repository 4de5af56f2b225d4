"""Experiments: what the papers measure, from text to table."""
