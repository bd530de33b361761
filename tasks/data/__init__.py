"""Data that tasks share: configurations that import without torch, and the data modules they build."""
