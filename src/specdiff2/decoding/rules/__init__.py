"""One acceptance rule per module; ``decoding.acceptance`` holds the registry."""
