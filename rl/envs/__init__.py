"""Environments that come with the toolkit."""
