"""``compile=auto``: tries strategies on the training's own steps and keeps the one with which the run is over first."""
