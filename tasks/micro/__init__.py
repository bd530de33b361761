"""Micro: small networks on generated data.

For what compiling gains or costs where little or nothing repeats, and for quick tests.
"""

CLASSES = 10
"""Outputs of every micro model."""
VOCABULARY = 256
"""Token ids of ragged sequences, padding among them."""
