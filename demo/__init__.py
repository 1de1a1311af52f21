"""The pair of small models that ships, the script that trained it, and prompts to run it on."""
