import asyncio
import random
from typing import Any

import pytest

from raises import raises_error
from rlhf_serve.errors import APIError
from rlhf_serve.http.limits import Admission, ConcurrencyLimiter, RateLimiter

pytestmark = pytest.mark.anyio


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def retry_after(error: APIError) -> str:
    assert error.headers is not None
    return error.headers["Retry-After"]


def takes(limiter: RateLimiter, key: str, count: int) -> int:
    """How many of `count` requests are accepted."""
    accepted = 0
    for _ in range(count):
        try:
            limiter.take(key)
        except APIError as error:
            assert (error.status_code, error.code) == (429, "rate_limit_exceeded")
        else:
            accepted += 1
    return accepted


def test_a_burst_and_then_the_rate() -> None:
    clock = Clock()
    limiter = RateLimiter(30, burst=3, clock=clock)  # 30 a minute: one in 2 s
    assert takes(limiter, "a", 10) == 3
    assert takes(limiter, "b", 1) == 1  # another key has a bucket of its own
    clock.now += 1.9
    assert takes(limiter, "a", 1) == 0
    clock.now += 0.1
    assert takes(limiter, "a", 2) == 1
    clock.now += 600
    assert takes(limiter, "a", 10) == 3  # no more than the burst is saved up


def test_the_wait_is_told() -> None:
    clock = Clock()
    limiter = RateLimiter(6, burst=1, clock=clock)  # one in 10 s
    limiter.take("a")
    clock.now += 2.5
    with pytest.raises(APIError, match="more than 6 requests a minute") as caught:
        limiter.take("a")
    assert retry_after(caught.value) == "8"  # 7.5 s are left, whole seconds rounded up


def test_refused_requests_do_not_lengthen_the_wait() -> None:
    clock = Clock()
    limiter = RateLimiter(60, burst=1, clock=clock)
    for _ in range(10):
        takes(limiter, "a", 100)
        clock.now += 0.1
    assert takes(limiter, "a", 1) == 1


def test_full_buckets_are_forgotten() -> None:
    clock = Clock()
    limiter = RateLimiter(60, burst=5, clock=clock)  # full again after at most 5 s
    for number in range(1000):
        limiter.take(str(number))
        clock.now += 0.1
        assert len(limiter) <= 51
    clock.now += 5
    limiter.take("last")
    assert len(limiter) == 1


def test_buckets_are_bounded_whatever_the_keys() -> None:
    limiter = RateLimiter(1, burst=1, clock=Clock())
    for number in range(10_050):
        limiter.take(str(number))
    assert len(limiter) == 10_000
    assert takes(limiter, "10049", 1) == 0


def test_the_default_burst_is_a_minute() -> None:
    assert takes(RateLimiter(20, clock=Clock()), "a", 100) == 20
    assert takes(RateLimiter(0.1, clock=Clock()), "a", 100) == 1


def test_a_key_has_so_many_at_a_time() -> None:
    limiter = ConcurrencyLimiter(2)
    with limiter.hold("a"), limiter.hold("a"):
        with pytest.raises(APIError, match="more than 2 requests at a time") as caught, limiter.hold("a"):
            pass
        assert caught.value.status_code == 429 and retry_after(caught.value) == "1"
        with limiter.hold("b"):
            assert len(limiter) == 2
    with pytest.raises(ZeroDivisionError), limiter.hold("a"):
        raise ZeroDivisionError
    assert len(limiter) == 0


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: RateLimiter(0), "rate_limit"),
        (lambda: RateLimiter(float("nan"), burst=1), "rate_limit"),
        (lambda: RateLimiter(1, burst=0), "rate_limit"),
        (lambda: ConcurrencyLimiter(0), "concurrency"),
        (lambda: Admission(0, 1), "queue"),
        (lambda: Admission(1, -1), "queue"),
    ],
)
def test_numbers_out_of_range_are_refused(build: Any, key: str) -> None:
    with raises_error("invalid_value", key=key):
        build()


class Door:
    """An admission, visitors that stay until they are let go, and the order in which they came in."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.entered: list[int] = []
        self.waited: dict[int, float] = {}
        self._leave: dict[int, asyncio.Event] = {}

    async def visit(self, name: int) -> None:
        self._leave[name] = asyncio.Event()
        async with self.admission.enter() as waited:
            self.entered.append(name)
            self.waited[name] = waited
            await self._leave[name].wait()

    def let_go(self, name: int) -> None:
        self._leave[name].set()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
    clock = Clock()
    door = Door(Admission(2, 3, clock=clock))
    tasks = [asyncio.create_task(door.visit(name)) for name in range(5)]
    await settle()
    assert door.entered == [0, 1]
    assert (door.admission.running, door.admission.waiting) == (2, 3)
    clock.now += 4
    door.let_go(1)
    await settle()
    door.let_go(0)
    await settle()
    assert door.entered == [0, 1, 2, 3]
    assert door.waited == {0: 0, 1: 0, 2: 4, 3: 4}
    for name in (2, 3, 4):
        door.let_go(name)
        await settle()
    await asyncio.gather(*tasks)
    assert door.entered == [0, 1, 2, 3, 4]
    assert (door.admission.running, door.admission.waiting) == (0, 0)


async def test_a_full_queue_refuses_with_an_estimate() -> None:
    clock = Clock()
    admission = Admission(2, 4, clock=clock)
    door = Door(admission)
    for _ in range(60):  # each is served in 6 s: the mean forgets its first guess
        async with admission.enter():
            clock.now += 6
    tasks = [asyncio.create_task(door.visit(name)) for name in range(6)]
    await settle()
    with pytest.raises(APIError) as caught:
        async with admission.enter():
            pass
    assert (caught.value.status_code, caught.value.code) == (429, "queue_full")
    assert retry_after(caught.value) == "15"  # 4 wait and this one: 5 * 6 s, two at a time
    assert (admission.running, admission.waiting) == (2, 4)
    for name in range(6):
        door.let_go(name)
        await settle()
    await asyncio.gather(*tasks)


async def test_the_estimate_is_bounded() -> None:
    clock = Clock()
    admission = Admission(1, 0, clock=clock)
    assert admission.retry_after_s() == 1
    async with admission.enter():
        clock.now += 1e6
    assert admission.retry_after_s() == 60


async def test_one_that_is_cancelled_while_it_waits_leaves_the_queue() -> None:
    door = Door(Admission(1, 2))
    first, second, third = [asyncio.create_task(door.visit(name)) for name in range(3)]
    await settle()
    second.cancel()
    await settle()
    assert door.admission.waiting == 1
    fourth = asyncio.create_task(door.visit(3))  # has room now
    for name in (0, 2, 3):
        await settle()
        door.let_go(name)
    await asyncio.gather(first, third, fourth)
    assert door.entered == [0, 2, 3] and second.cancelled()
    assert (door.admission.running, door.admission.waiting) == (0, 0)


async def test_one_that_is_cancelled_as_it_is_given_a_place_passes_it_on() -> None:
    door = Door(Admission(1, 2))
    async with door.admission.enter():
        second, third = [asyncio.create_task(door.visit(name)) for name in (1, 2)]
        await settle()
    second.cancel()  # the place is its own already, but it has not run since
    assert (door.admission.running, door.admission.waiting) == (1, 1)
    await settle()
    assert door.entered == [2] and second.cancelled()
    door.let_go(2)
    await third
    assert (door.admission.running, door.admission.waiting) == (0, 0)


async def test_one_that_is_cancelled_just_before_a_place_is_free_does_not_take_it() -> None:
    door = Door(Admission(1, 2))
    first, second, third = [asyncio.create_task(door.visit(name)) for name in range(3)]
    await settle()
    door.let_go(0)
    second.cancel()
    await settle()
    assert door.entered == [0, 2] and second.cancelled() and first.done()
    door.let_go(2)
    await third
    assert (door.admission.running, door.admission.waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_is_ever_lost(seed: int) -> None:
    draw = random.Random(seed)
    admission = Admission(3, 5)
    most = 0

    async def visit() -> None:
        nonlocal most
        async with admission.enter():
            most = max(most, admission.running)
            assert admission.running <= 3 and admission.waiting <= 5
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
            if draw.random() < 0.2:
                raise ZeroDivisionError

    tasks: list[asyncio.Task[None]] = []
    for _ in range(200):
        tasks.append(asyncio.create_task(visit()))
        if draw.random() < 0.4:
            draw.choice(tasks).cancel()
        if draw.random() < 0.6:
            await asyncio.sleep(0)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    kinds = {type(outcome) for outcome in outcomes}
    assert kinds == {type(None), asyncio.CancelledError, ZeroDivisionError, APIError}
    assert most == 3
    assert (admission.running, admission.waiting) == (0, 0)
