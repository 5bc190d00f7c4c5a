"""Sizes as people read them: those of a model of thousands of weights, too, of which megabytes would say nothing."""

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def sized(num_bytes: int) -> str:
    """
    >>> [sized(number) for number in (0, 7_200, 1_744_000, 16_060_000_000)]
    ['0 bytes', '7.2 kB', '1.7 MB', '16.1 GB']
    """
    return next((f"{num_bytes / size:.1f} {unit}" for size, unit in _UNITS if num_bytes >= size), f"{num_bytes} bytes")
