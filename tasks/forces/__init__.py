"""Energies and forces of clusters of atoms, learned by a network that messages pass through.

The example of a loss that holds a gradient, for ``second_order``.
"""

KINDS = 3
"""Chemical elements, numbered from 1; 0 is padding."""
