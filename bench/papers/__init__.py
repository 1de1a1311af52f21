"""What the four papers claim, beside what is measured here."""
