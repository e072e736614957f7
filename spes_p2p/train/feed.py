"""A round's batches on their way from the cached data to the device, in the order of its steps.

For a GPU a thread reads the next step's batch into pinned memory while this step is computed, and the copy to the card
runs beside the kernels. What is read is the same either way, but for one batch more where a round is cut short.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor


def batches(
    read: Callable[[int], np.ndarray], steps: int, device: torch.device, *, ahead: bool | None = None
) -> Generator[Tensor, None, None]:
    """int64 tokens (sequences, length) of each step on `device`; `read(index)` gives those of local step `index`.

    `ahead` is whether to read one step ahead in a thread (default: for a GPU). Raises what `read` raises, when its
    batch is asked for. Close the iterator to end the thread, which waits for a reading under way.
    """

    def load(index: int) -> Tensor:
        tokens = torch.from_numpy(read(index).astype(np.int64))
        return tokens.pin_memory() if device.type == "cuda" else tokens

    if not (device.type == "cuda" if ahead is None else ahead):
        for index in range(steps):
            yield load(index).to(device)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        coming: Future[Tensor] | None = pool.submit(load, 0) if steps else None
        for index in range(steps):
            assert coming is not None
            tokens = coming.result()
            coming = pool.submit(load, index + 1) if index + 1 < steps else None
            yield tokens.to(device, non_blocking=True)
