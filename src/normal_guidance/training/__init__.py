"""Training: one configuration in a plain loop (`fit`), or a whole grid at once (`sweep`)."""
