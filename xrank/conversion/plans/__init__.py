"""Plans of whole conversions, made from metadata alone."""
