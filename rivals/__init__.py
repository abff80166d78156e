"""What the paper compares itself with, one short file each, on the same pages, models and seeds."""
