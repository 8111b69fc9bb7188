"""Signals wait for the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from rlhf_infer.vllm.signals_held import SignalsHeld


class Interrupted(Exception):
    """What the handler of these tests raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_answered_after_the_step():
    with pytest.raises(Interrupted), SignalsHeld() as signals:
        signal.raise_signal(signal.SIGUSR1)
        steps = 1
        signals.deliver()
        steps = 2
    assert steps == 1
    with pytest.raises(Interrupted):  # the handler is back
        signal.raise_signal(signal.SIGUSR1)


def test_what_nobody_delivered_is_answered_at_the_end():
    done = False
    with pytest.raises(Interrupted), SignalsHeld():
        signal.raise_signal(signal.SIGUSR1)
        done = True
    assert done


def test_a_second_signal_does_not_wait():
    with pytest.raises(Interrupted), SignalsHeld():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("the second one waited")


def test_another_thread_leaves_handlers_alone():
    before, seen = signal.getsignal(signal.SIGUSR1), []

    def look() -> None:
        with SignalsHeld():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
