"""An OpenAI-compatible HTTP server on the native decoder."""
