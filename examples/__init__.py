"""What stands in for the big things on a laptop; README.md lists the files."""
