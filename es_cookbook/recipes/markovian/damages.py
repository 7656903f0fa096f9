"""Ways to damage a chain of thought, by degrees: what of it does the answer depend on?

    delete           characters, anywhere, are left out
    truncate_front   characters from the start are left out
    truncate_back    characters from the end are left out
    digits           digits are replaced by other digits
    alphanumerics    letters and digits are replaced by others of both

as in Viteri et al. (arXiv:2404.18988). A share of 0 changes nothing. What is damaged is a function
of the seed, and a larger share damages all that a smaller one does, and more.
"""

import random
import string
from typing import Literal, TypeAlias, assert_never, get_args

Damage: TypeAlias = Literal["delete", "truncate_front", "truncate_back", "digits", "alphanumerics"]

DAMAGES: tuple[Damage, ...] = get_args(Damage)
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

_ALPHANUMERICS = string.ascii_letters + string.digits


def damaged(thought: str, damage: Damage, share: float, seed: int) -> str:
    """The thought with a share of its characters, or of those that the damage is about, damaged.

    >>> damaged("8,17,19", "truncate_front", 0.4, 0), damaged("8,17,19", "truncate_back", 0.4, 0)
    ('7,19', '8,17')
    >>> damaged("8,17,19", "delete", 1.0, 0), damaged("8,17,19", "digits", 0.0, 0)
    ('', '8,17,19')
    """
    count = round(share * len(thought))
    if damage == "truncate_front":
        return thought[count:]
    if damage == "truncate_back":
        return thought[: len(thought) - count]
    rng = random.Random(seed)
    if damage == "delete":
        gone = set(rng.sample(range(len(thought)), len(thought))[:count])
        return "".join(each for i, each in enumerate(thought) if i not in gone)
    if damage == "digits":
        return _replaced(thought, string.digits, share, rng)
    if damage == "alphanumerics":
        return _replaced(thought, _ALPHANUMERICS, share, rng)
    assert_never(damage)


def _replaced(thought: str, alphabet: str, share: float, rng: random.Random) -> str:
    """A share of the characters that are in the alphabet, each by another one of it."""
    places = [i for i, each in enumerate(thought) if each in alphabet]
    others = [rng.choice(alphabet.replace(thought[i], "")) for i in places]
    order = rng.sample(range(len(places)), len(places))
    found = list(thought)
    for i in order[: round(share * len(places))]:
        found[places[i]] = others[i]
    return "".join(found)
