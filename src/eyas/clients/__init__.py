"""Talking to servers: health, metrics, acceptance in one definition, the OpenAI protocol. Torch-free."""
