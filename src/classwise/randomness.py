"""Every random draw in a study comes from a seed that its name determines."""

import hashlib


def seed_of(*names: object) -> int:
    """A 63-bit seed from the parts of a name, for example study, data set, architecture, defense, removed, seed."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
