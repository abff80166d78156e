"""An environment of your own, and a loss of your own, handed in."""
