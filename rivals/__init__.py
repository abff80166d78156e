"""Other methods, and GSPO without one of its parts: a short file each, on the files of the root as they are."""
