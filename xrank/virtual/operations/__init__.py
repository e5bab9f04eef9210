"""Operations over sharded tensors: products, feed-forward layers, and the choice among their shardings."""
