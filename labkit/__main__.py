"""``python -m labkit`` is ``labkit``, also where it is not installed."""

from labkit.cli import app

app()
