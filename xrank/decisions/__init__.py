"""Sources with what lies beside them, and the proven plans of folders, states and loads; no tensor is read."""
