"""What a job will take of memory, before it runs."""
