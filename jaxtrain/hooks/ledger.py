"""Where the time of a run went, over all its processes: every second belongs to exactly one of SHARES.

A process charges its seconds to the innermost open phase. status.json carries the sums from one process to the next,
and every sealed step those of its moment, so that a later process knows what was done after that step and is lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SHARES = ("init", "compile", "train", "data_wait", "evaluate", "save", "lost", "pause", "other")
"""lost: training that was done again, or left by a rollback. pause: no process of the run was there, or it was killed
before it wrote its time down (every two seconds of training). other: files, report, console."""

REDONE = ("train", "data_wait", "evaluate")
"""What a run that goes back to a sealed step does again."""


class Ledger:
    """From the moment it is made. waited: seconds that training has waited for its batches so far, in this process."""

    def __init__(self) -> None:
        self.waited: Callable[[], float] = lambda: 0.0
        self._seconds = dict.fromkeys(SHARES, 0.0)
        self._phases = ["other"]
        self._begun = time.time()
        self._since, self._seen = time.monotonic(), 0.0

    @contextlib.contextmanager
    def phase(self, share: str) -> Iterator[None]:
        """Charge what follows to `share`, one of SHARES."""
        self._charge()
        self._phases.append(share)
        try:
            yield
        finally:
            self._charge()
            self._phases.pop()

    def go_on(self, before: Mapping[str, float], sealed: Mapping[str, float], *, ended: bool = False) -> None:
        """Add what the processes before have spent. before: their `account`; sealed: that of the step gone on from.

        ended: the run had ended by itself and is extended: what lay in between is no part of its time.
        """
        if not before:
            return
        for share in SHARES:
            self._seconds[share] += before.get(share, 0.0)
        between = max(self._begun - before["until"], 0.0)
        self._seconds["pause"] += 0.0 if ended else between
        self._begun = before["begun"] + (between if ended else 0.0)
        self.back_to(sealed)

    def back_to(self, sealed: Mapping[str, float]) -> None:
        """What was done beyond the sealed step with this account is lost."""
        self._charge()
        for share in REDONE:
            beyond = max(self._seconds[share] - sealed.get(share, 0.0), 0.0)
            self._seconds[share] -= beyond
            self._seconds["lost"] += beyond

    def account(self) -> dict[str, float]:
        """{share: seconds} up to now, which sum to `until` - `begun`, times of the system's clock."""
        self._charge()
        rounded = {share: round(seconds, 3) for share, seconds in self._seconds.items()}
        return {**rounded, "begun": self._begun, "until": time.time()}

    def _charge(self) -> None:
        now, waited = time.monotonic(), self.waited()
        took, wait = now - self._since, waited - self._seen
        self._since, self._seen = now, waited
        if self._phases[-1] == "train":
            self._seconds["data_wait"] += wait
            took -= wait
        self._seconds[self._phases[-1]] += took


def wall(account: Mapping[str, Any]) -> float:
    """Seconds from the first process to the last word, without those between an end and an extension."""
    return float(sum(account.get(share, 0.0) for share in SHARES))


def goodput(account: Mapping[str, Any]) -> float:
    """The share of the wall time that was training that counts."""
    return float(account["train"]) / max(wall(account), 1e-9)
