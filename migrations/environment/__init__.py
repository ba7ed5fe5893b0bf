"""Alembic's environment, apart from the steps: Alembic takes every other file of that folder for one."""
