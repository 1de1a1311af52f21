"""vLLM: an agent inside it, which notes rounds in a folder and takes its table from there, and what
stands beside that folder: `follow`, and a tuning of the server that runs."""
