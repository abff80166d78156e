"""What test files share. A test imports from here and from conftest, and never from a test."""
