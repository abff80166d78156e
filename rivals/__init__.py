"""What the paper compares itself with, a short file each, on the middle as it is; README.md lists them."""
