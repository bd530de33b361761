"""Models that tasks share."""
