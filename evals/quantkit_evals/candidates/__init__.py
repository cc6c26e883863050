"""What is evaluated (``candidate``): our engine, a model of transformers, an OpenAI-style endpoint."""
