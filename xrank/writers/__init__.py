"""Output: the Hugging Face folder, staged, journalled and committed by one rename."""
