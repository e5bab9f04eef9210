"""The reader of models that one ``torch.save`` wrote whole, under any name and among other values."""
