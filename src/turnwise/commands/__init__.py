"""The commands of `turnwise`: one file each, a few lines over the Python API."""
