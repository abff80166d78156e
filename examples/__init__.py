"""A world of your own, and a loss of your own, handed in."""
