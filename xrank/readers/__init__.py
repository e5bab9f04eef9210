"""One module a source format: what lies where, found from metadata alone."""
