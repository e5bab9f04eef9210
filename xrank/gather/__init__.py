"""Live gathers: the two functions that bring tensors and configs of many ranks to one; `xrank.ranks` has the rest."""
