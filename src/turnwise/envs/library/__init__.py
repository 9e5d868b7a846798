"""The worlds that come with turnwise: one file each, data, env and reward together."""
