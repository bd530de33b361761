"""Scripts: each is run as ``python -m scripts.<name>``."""
