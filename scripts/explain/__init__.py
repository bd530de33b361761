"""Explain: where the compiler splits, repeats or leaves out the user's training step, and at which line of code."""
