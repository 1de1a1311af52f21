"""What is promised of a vLLM that serves, in a real one."""
