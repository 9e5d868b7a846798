"""What a run can be told: the rooms' own sections put together, files, overrides, presets."""
