"""Which epoch of a run is the best, and by what."""

import math
from collections.abc import Mapping, Sequence

from ddpkit.errors import UserError
from ddpkit.ranks import distributed
from ddpkit.run.folder import RunFolder
from ddpkit.run.states import State


class Best:
    """The score by which best.pt is chosen, and the best one so far; of a run in `folder`.

    best: its name; or several, of which the first one that there is counts; after a name there may
        be "max" or "min". images: the fingerprint of those that it is worked out on.

    name: of the score. is_higher: whether a higher one is better; None: not known before it is
    worked out. score, epoch: of the best.
    """

    def __init__(
        self, best: str | Sequence[str], images: str, folder: RunFolder
    ) -> None:
        self.directions = parse_best(best)
        self.images = images
        self.folder = folder
        state = folder.state or {}
        row = (state.get("history") or [{}])[-1]
        names = [name for name in self.directions if name in row]
        self.name = next(iter(names or self.directions))
        self.is_higher = self.directions[self.name]
        then = state.get("best_by", ["", None])  # of an earlier process
        if self.is_higher is None and then[0] == self.name:
            self.is_higher = then[1]
        if self.is_higher is None:
            self.is_higher = higher_is_better(self.name)
        self.score = -math.inf
        self.epoch = state.get("epoch", 0)
        self.searched_for = ""  # which `of` best.pt was looked at for
        # Killed before its first last.pt with a score, a run does not know yet which one it has.
        if row:
            self._search(self.epoch)

    @property
    def of(self) -> str:
        """By which score, on which images, best.pt is the best: what a checkpoint says of it."""
        lowest = " (lowest)" if self.is_higher is False else ""
        return f"{self.name}{lowest} on {self.images}"

    def state(self) -> State:
        return {
            "best": self.score,
            "best_of": self.of,
            "best_by": [self.name, self.is_higher],
        }

    def choose(self, row: Mapping, epoch: int) -> None:
        """Take from rank 0's row by which score best.pt is chosen."""
        self.name, self.is_higher = distributed.from_rank_zero(self._chosen, row)
        if self.of != self.searched_for:
            self._search(epoch)

    def take(self, score: float, epoch: int) -> bool:
        """Return whether the score of a finished epoch is the best so far."""
        is_best = score > self.score if self.is_higher else score < self.score
        if self.epoch == epoch:  # the run was killed after it had saved best.pt
            is_best = is_best or score == self.score
        if is_best:
            self.score = score
            self.epoch = epoch
        return is_best

    def _search(self, epoch: int) -> None:
        """Take the score of best.pt, if that is the best of this name on these images."""
        best = distributed.await_rank_zero(self.folder.best_score, self.of)
        worst = math.inf if self.is_higher is False else -math.inf
        self.score, self.epoch = best or (worst, epoch)
        self.searched_for = self.of

    def _chosen(self, row: Mapping) -> tuple[str, bool]:
        """Return the name of the score in a row, and whether a higher one is better."""
        names = [name for name in self.directions if name in row]
        if not names:
            given = " or ".join(self.directions)
            raise UserError(f"BEST in model.py is {given}: use one of {', '.join(row)}")
        name = names[0]
        is_higher = self.directions[name]
        if is_higher is None:
            is_higher = higher_is_better(name, row[name])
        if is_higher is None:
            raise UserError(
                f'BEST in model.py is "{name}", but is higher or lower better? Write BEST = '
                f'"{name}", "max" or BEST = "{name}", "min"'
            )
        return name, is_higher


def parse_best(best: str | Sequence[str]) -> dict[str, bool | None]:
    """Return the metrics that BEST names, and whether higher is better, if that is said.

    It is one name, or several; after a name there may be "max" or "min".
    """
    directions: dict[str, bool | None] = {}
    name = ""
    for word in [best] if isinstance(best, str) else best:
        if name and word in ("max", "min"):
            directions[name] = word == "max"
        else:
            name = word
            directions[name] = None
    return directions


def higher_is_better(name: str, value: object = None) -> bool | None:
    """Return whether a higher `value` of the column `name` is better; None: nobody says so."""
    known = getattr(value, "higher_is_better", None)
    if known is None and name.endswith("loss"):
        return False
    return known
