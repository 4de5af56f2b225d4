"""Training: rerankers that learn from a frozen reader which passage helps it, and readers with longer windows or taught
to answer."""
