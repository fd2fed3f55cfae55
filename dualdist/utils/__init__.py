"""Helpers with users in several packages."""
