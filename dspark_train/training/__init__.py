"""The training of drafters with Lightning."""
