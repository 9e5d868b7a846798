"""The config of a run: the sections of all packages together, files, overrides and presets."""
