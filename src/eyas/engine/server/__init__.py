"""The embedded engine as an OpenAI-compatible server: `python -m eyas.engine.server`."""
