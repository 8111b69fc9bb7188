"""Signals become a flag once; the second one acts; everything is put back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rlhf_algos.engine.signals import GracefulStop


@pytest.fixture(autouse=True)
def hang_up_is_not_ignored() -> Iterator[None]:
    """As it would be, here and in processes that are started, where `nohup` started these tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_the_first_signal_is_a_flag(capfd, number, code):
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert not stop.requested and stop.exit_code is None
        os.kill(os.getpid(), number)
        assert stop.requested and stop.signal is number and stop.exit_code == code
        assert signal.getsignal(number) is before  # the next one acts
    assert signal.getsignal(number) is before
    assert f"{number.name}: finishing this step and saving" in capfd.readouterr().err


def test_a_second_interrupt_acts_at_once():
    with pytest.raises(KeyboardInterrupt), GracefulStop(""):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back_without_a_signal():
    before = signal.getsignal(signal.SIGTERM)
    with GracefulStop():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            os.kill(os.getpid(), number)
            assert not stop.requested
    finally:
        signal.signal(number, before)


def test_another_thread_changes_nothing():
    seen = []

    def work():
        with GracefulStop() as stop:
            seen.append(stop.requested)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False] and signal.getsignal(signal.SIGTERM) is before


_LOOP = """
import sys, time
from rlhf_algos.engine.signals import GracefulStop
with GracefulStop() as stop:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if stop.requested and len(sys.argv) == 1:
            print("saved", flush=True)
            sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(
    ("arguments", "signals", "code", "said"),
    [
        ([], [signal.SIGTERM], 143, "saved\n"),
        ([], [signal.SIGHUP], 129, "saved\n"),
        (["never asks"], [signal.SIGTERM, signal.SIGTERM], -signal.SIGTERM, ""),
    ],
)
def test_a_process_that_is_told_to_end(arguments, signals, code, said):
    command = [sys.executable, "-c", _LOOP, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        for count, number in enumerate(signals, 1):
            process.send_signal(number)
            if count < len(signals):  # two signals sent at once may arrive as one
                assert process.stderr.readline() == "\n"
                assert process.stderr.readline().startswith("SIGTERM: ")
        assert process.stdout.read() == said
        assert process.wait() == code
