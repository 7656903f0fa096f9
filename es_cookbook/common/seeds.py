"""Seeds of all random numbers: derived from (run seed, purpose, indices), never drawn.

Nothing in this package uses global random state. All random code takes seeds from here, so that
any part of a run can be reproduced alone, in any order, on any machine.
"""

import hashlib


def derive_seed(run_seed: int, purpose: str, *indices: int) -> int:
    """Return a 63-bit seed, a pure function of the arguments (BLAKE2b of their text).

    Distinct arguments give distinct seeds, up to a chance of n²/2⁶⁴ among n of them. Indices are
    generation, problem, attempt and so on.

    >>> derive_seed(0, "genome", 3, 1) == derive_seed(0, "genome", 3, 1)
    True
    >>> derive_seed(0, "genome", 3, 1) == derive_seed(0, "genome", 31)
    False
    """
    text = "/".join([str(run_seed), purpose, *map(str, indices)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
