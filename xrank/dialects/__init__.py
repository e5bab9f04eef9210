"""Other systems' terms for layouts, each to and from xrank's."""
