"""Predicts what a training step will cost, without running it."""
