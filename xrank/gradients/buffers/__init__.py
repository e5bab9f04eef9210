"""Memory of gradients, the exchange of their buckets, and the gathering of stepped parameters."""
