"""Which text fits a query best, by BM25 (Robertson and Zaragoza, 2009), over an inverted index.

Terms are lower-case words, without stemming. A query costs time in the texts that share a word
with it, not in all of them.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

K1, B = 1.2, 0.75


class BM25:
    """An index of texts.

    >>> index = BM25(["the river of rust", "anna lives in rust", "the river of oslo"])
    >>> index.search("river rust", 1), index.search("nothing", 1)
    (['the river of rust'], [])
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        counts = [Counter(terms(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(len(lengths), 1)
        self._postings: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for term, n in count.items():
                weight = n * (K1 + 1) / (n + K1 * (1 - B + B * length / mean))
                self._postings[term].append((i, weight))

    def search(self, query: str, most: int) -> list[str]:
        """The texts that fit best, the best first, equal ones in their order; of each some word."""
        scores: Counter[int] = Counter()
        for term in set(terms(query)):
            found = self._postings.get(term, [])
            rarity = math.log(1 + (len(self._texts) - len(found) + 0.5) / (len(found) + 0.5))
            for i, weight in found:
                scores[i] += rarity * weight  # pyright: ignore[reportArgumentType]
        ranked = sorted(scores, key=lambda i: (-scores[i], i))
        return [self._texts[i] for i in ranked[:most]]


def terms(text: str) -> list[str]:
    """The words of a text."""
    return re.findall(r"\w+", text.lower())
