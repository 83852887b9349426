"""Micro-batches that are made ahead: the same for any number of threads, and their mistakes are not lost."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable

import numpy as np
import pytest

from shardweave.launcher.data.batches import Batches
from shardweave.launcher.data.blend import BlendOrder
from shardweave.launcher.data.dataset import Dataset, MicroBatch
from shardweave.launcher.data.loader import Loader

DATA = Dataset.of_tokens(np.arange(1, 401) % 251, 4)


def _batches(replica: int = 0, replicas: int = 1, **options: object) -> Batches:
    order = BlendOrder(DATA.sources, seed=5)
    sizes = {"global_batch": 8, "micro": 2, "replicas": replicas, "replica": replica, "seed": 5}
    return Batches(dataset=DATA, order=order, **sizes, **options)  # type: ignore[arg-type]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardweave loader")}


def _gone(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(timeout=10)
    return not any(thread.is_alive() for thread in threads)


def _noise(tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
    time.sleep(random.random() / 1000)  # so that threads finish in another order than they began
    return tokens + random.integers(0, 100, tokens.shape)


def _seen(batches: Callable[[int], list[MicroBatch]] | object, visits: list[int]) -> list[list[list[int]]]:
    return [
        [
            [*batch.samples.tolist(), *batch.inputs.flatten().tolist(), *batch.targets.flatten().tolist()]
            for batch in made
        ]
        for made in (batches.at(visit) for visit in visits)  # type: ignore[union-attr]
    ]


def test_any_number_of_workers_gives_the_same() -> None:
    visits = [
        *range(0, 80, 8),
        80,
        80,
        400,
        408,
        16,
    ]  # steps, one looked at twice, and jumps as a resume makes
    right = _seen(_batches(transform=_noise), visits)
    for workers in (0, 1, 3):
        loader = Loader(_batches(transform=_noise), 8, workers=workers)
        assert _seen(loader, visits) == right
        loader.close()


def test_b110_random_changes_are_of_the_sample_and_the_epoch() -> None:
    """Equal on the ranks of a replica and in every layout, different between samples and epochs."""

    def noise(tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return random.integers(0, 2**40, tokens.shape)

    whole = {
        sample: window
        for batch in _batches(transform=noise).at(0)
        for sample, window in zip(batch.samples.tolist(), batch.inputs.tolist(), strict=True)
    }
    assert len({tuple(window) for window in whole.values()}) == 8
    for replica in range(2):
        with_workers = Loader(_batches(replica, 2, transform=noise), 8, workers=2)
        for batch in with_workers.at(0):
            assert [whole[sample] for sample in batch.samples.tolist()] == batch.inputs.tolist()
        with_workers.close()
    epoch = DATA.num_train
    order = BlendOrder(DATA.sources, seed=5)
    one = Batches(dataset=DATA, order=order, global_batch=1, micro=1, transform=noise, seed=5)
    sample = order.visits(0, 1).samples[0]
    again = epoch + order.visits(epoch, epoch).samples.tolist().index(sample)
    assert one.at(again)[0].samples.tolist() == [sample]
    assert one.at(again)[0].inputs.tolist() != one.at(0)[0].inputs.tolist()


def test_a_transform_gives_as_many_tokens_as_it_gets() -> None:
    with pytest.raises(ValueError, match="it has to give 5 tokens"):
        _batches(transform=lambda tokens, random: tokens[1:]).at(0)


def test_an_error_is_raised_at_its_step_with_the_traceback_of_the_thread() -> None:
    class Broken:
        def at(self, visit: int) -> list[MicroBatch]:
            if visit == 24:
                raise OSError("the disk is gone")
            return _batches().at(visit)

    loader = Loader(Broken(), 8, workers=2)
    for visit in (0, 8, 16):
        assert loader.at(visit)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        loader.at(24)
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise OSError("the disk is gone")' in shown
    assert "the step which begins with sample 24" in shown
    assert loader.at(32)
    loader.close()


def test_threads_end_when_they_are_closed_and_when_nobody_asks_any_more() -> None:
    before = _threads()
    loader = Loader(_batches(), 8, workers=3)
    assert _threads() == before  # none before the first step
    loader.at(0)
    started = _threads() - before
    assert len(started) == 3
    loader.close()
    assert not any(thread.is_alive() for thread in started)
    assert loader.at(8)[0].samples.tolist() == _batches().at(8)[0].samples.tolist()
    started = _threads() - before
    del loader
    gc.collect()
    assert _gone(started)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    loader = Loader(_batches(), 8, workers=2)
    loader.at(0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(loader.at(8)[0].samples.tolist()).encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 1000).decode() == str(loader.at(8)[0].samples.tolist())
    os.waitpid(child, 0)
    loader.close()


def test_making_overlaps_computing() -> None:
    """Ten steps of 30 ms whose micro-batches take 20 ms: the steps wait for the first ones only."""

    class Slow:
        def at(self, visit: int) -> list[MicroBatch]:
            time.sleep(0.02)
            return _batches().at(visit)

    def waited(workers: int) -> float:
        loader, total = Loader(Slow(), 8, workers=workers), 0.0
        for visit in range(0, 80, 8):
            began = time.perf_counter()
            loader.at(visit)
            total += time.perf_counter() - began
            time.sleep(0.03)
        loader.close()
        return total

    assert waited(0) > 0.2
    assert waited(1) < 0.1


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="it has to be a multiple of 6"):
        Batches(dataset=DATA, order=BlendOrder(DATA.sources, 0), global_batch=8, micro=2, replicas=3)
    with pytest.raises(ValueError, match="counted from 0"):
        Batches(
            dataset=DATA, order=BlendOrder(DATA.sources, 0), global_batch=8, micro=2, replicas=2, replica=2
        )
    with pytest.raises(ValueError, match="workers=-1"):
        Loader(_batches(), 8, workers=-1)
