"""Floor 2. The demand test: can every deadline be kept, and if not, which can?

Exact for earliest-deadline-first on a fluid server (Liu and Layland 1973): all deadlines can be kept if and
only if, for every deadline d, the work due by d is no more than what is done until d. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence


def finishes(jobs: Sequence[tuple[float, float]], rate: float, now: float) -> list[float]:
    """When each of *jobs* (deadline, work) is done, the earliest deadline first, at *rate* a second."""
    order = sorted(range(len(jobs)), key=lambda place: jobs[place][0])
    done = [0.0] * len(jobs)
    work = 0.0
    for place in order:
        work += jobs[place][1]
        done[place] = now + work / rate
    return done


def earliest(jobs: Sequence[tuple[float, float]], work: float, rate: float, now: float) -> float:
    """The earliest deadline that a new job of *work* can be promised so that all of *jobs* keep theirs.

    Those of *jobs* that are late anyway are not made the new one's fault. A deadline is feasible when the job
    itself is done by then, going after what is due before, and when none that is due later gets late by it.
    """
    before = finishes(jobs, rate, now)
    known = sorted(
        (deadline, size, end <= deadline) for (deadline, size), end in zip(jobs, before, strict=True)
    )
    # The later its deadline, the less it displaces: the first that displaces nobody is the earliest. Of equal
    # deadlines the one that came first goes first, so the new one's must lie before the next or after it.
    found = now + work / rate
    for place, start in enumerate([now, *(deadline for deadline, _, _ in known)]):
        ahead = sum(size for _, size, _ in known[:place])
        found = max(now + (ahead + work) / rate, start)
        later = known[place:]
        if later and found >= later[0][0]:
            continue
        sofar = ahead + work
        for deadline, size, kept in later:
            sofar += size
            if kept and now + sofar / rate > deadline:
                break
        else:
            return found
    return found
