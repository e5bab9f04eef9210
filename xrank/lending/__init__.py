"""A live model for a conversion: its ranks lend each other their parts by `xrank.ranks.loans`, and fill tensors."""
