"""The worlds that come with turnwise. The file of a world holds its env and its reward."""
