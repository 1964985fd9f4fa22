"""Training by the paper's protocol: one configuration in a plain loop (`fit`), or a whole grid at once (`sweep`)."""
