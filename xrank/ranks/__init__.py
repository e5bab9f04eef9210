"""How ranks find each other, wait, notice death, and pass on failure. Nothing else in xrank waits."""
