"""`python -m lightning_compress`: the command."""

from lightning_compress.command.cli import main

if __name__ == "__main__":
    main()
