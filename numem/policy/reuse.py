"""How likely something kept is to be used again, learnt from what was kept so far."""

# Uses are told apart up to here: what was used often enough is about as likely to be used again.
MOST_USES = 4
# Weight of what is believed before there is evidence.
PRIOR = 2


class ReuseRate:
    """Share of what had u uses that got one more, for each u.

        p(u) = (with more than u uses + PRIOR * p(u - 1)) / (with at least u uses + PRIOR),   p(-1) = 1/2

    So few that were used often are believed to be like those used a little less. What is still kept counts as not used
    again until it is: the estimate is low while there is little of it.
    """

    def __init__(self) -> None:
        self._reached = [0] * (MOST_USES + 1)
        self._again = [0] * (MOST_USES + 1)

    def kept(self) -> None:
        """Something is kept from now on; it has no uses yet."""
        self._reached[0] += 1

    def used(self, before: int) -> None:
        """Something that had `before` uses is used."""
        self._again[min(before, MOST_USES)] += 1
        self._reached[min(before + 1, MOST_USES)] += 1

    def probability(self, uses: int) -> float:
        """That something with so many uses is used again, in (0, 1)."""
        p = 0.5
        for at in range(min(uses, MOST_USES) + 1):
            p = (self._again[at] + PRIOR * p) / (self._reached[at] + PRIOR)
        return p
