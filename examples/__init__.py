"""The loop on one screen, and an environment and a loss of your own, handed in."""
