"""Other methods, and GSPO without one of its parts: a short file each, on the root as it is."""
