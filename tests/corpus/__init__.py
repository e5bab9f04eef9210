"""A recorded corpus: commands over every format, run by two versions of xrank, and what differs between them."""
