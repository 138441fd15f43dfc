"""The cache: bytes of a row, where rows lie, who owns a block."""
