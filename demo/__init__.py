"""The pair of small models that ships, and prompts to run it on."""
