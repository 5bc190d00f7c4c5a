"""What a job will take of memory and time before it runs, and where to put what."""
