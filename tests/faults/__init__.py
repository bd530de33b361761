"""Faults planted into compiled steps, and clean trainings: what the guards catch, miss, and must leave alone."""
