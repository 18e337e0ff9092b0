"""What is found by short runs before the run: the learning rate."""
