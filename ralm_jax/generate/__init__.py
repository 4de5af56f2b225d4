"""Text from a reader: decoding with a cache of keys and values, with retrieval in between, or by a server."""
