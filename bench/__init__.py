"""What is measured side by side."""
