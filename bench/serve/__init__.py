"""What `spectune serve` does amid traffic that does not stop."""
