"""``compile=auto``: what a strategy would cost and give is measured or estimated, and the cheapest is taken."""
