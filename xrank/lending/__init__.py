"""Memory of a live model that ranks lend each other, and the reading of it."""
