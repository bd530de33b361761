"""Libraries of other people that train with Lightning, in an environment of their own: ``./check --libraries``."""
