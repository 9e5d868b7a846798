"""Envs written for other libraries, as ours."""
