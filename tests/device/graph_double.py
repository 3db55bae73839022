"""A double of a CUDA graph: replaying runs the recorded work again on what the buffers hold."""

from __future__ import annotations

from collections.abc import Callable


class EagerRecorder:
    """Records by running once, as a capture does, and replays by running again."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay
