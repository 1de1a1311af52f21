"""Engines that users already run: what each can do, and how it records, follows publications and is
started."""
