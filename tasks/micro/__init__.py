"""Micro: small networks on generated data."""

CLASSES = 10
"""Outputs of every micro model."""
VOCABULARY = 256
"""Token ids of ragged sequences, padding among them."""
