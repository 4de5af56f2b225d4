"""Training: rerankers that learn from a frozen reader which passage helps it."""
