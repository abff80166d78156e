"""What is measured side by side, and the drivers of long experiments."""
