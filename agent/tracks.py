"""Several conversations with jobs at once, in one thread, so that an interrupt finds one place to stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable

Track = Generator[Callable[[], bool], None, None]
"""A conversation: it yields what it waits for, and goes on once that returns true."""

NAP_SECONDS = 0.01


def run_tracks(tracks: Iterable[Track], slots: int, on_wait: Callable[[], None] = lambda: None) -> None:
    """Runs the tracks, `slots` at a time, in order. The first exception ends them all and is raised."""
    waiting, active = deque(tracks), {}
    try:
        while waiting or active:
            while waiting and len(active) < slots:
                _advance(waiting.popleft(), active)
            for track, awaited in list(active.items()):
                if awaited():
                    _advance(track, active)
            on_wait()
            time.sleep(NAP_SECONDS)
    finally:
        for track in (*active, *waiting):
            track.close()


def _advance(track: Track, active: dict[Track, Callable[[], bool]]) -> None:
    try:
        active[track] = next(track)
    except StopIteration:
        active.pop(track, None)
