"""Corpora, retrievers and retrieval tables."""
