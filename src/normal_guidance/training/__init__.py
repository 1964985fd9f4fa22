"""Training: the objective, and one configuration at a time."""
