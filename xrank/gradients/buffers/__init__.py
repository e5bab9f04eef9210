"""Memory of gradients, the exchange of its buckets, and parameters that come back into it."""
