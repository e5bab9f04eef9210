"""What a conversion was asked for: source, base model, recipe, adapter, selection, options."""
