import threading

import zmq

from rollout_engine.process.waker import Waker


def readable(waker, timeout_ms=0):
    poller = zmq.Poller()
    poller.register(waker, zmq.POLLIN)
    return waker.fileno() in dict(poller.poll(timeout_ms))


def test_a_poll_ends_when_another_thread_wakes_it():
    waker = Waker()
    assert not readable(waker)
    thread = threading.Thread(target=waker.wake)
    thread.start()
    assert readable(waker, timeout_ms=60_000)
    thread.join()
    waker.drain()
    assert not readable(waker)
    waker.close()


def test_any_number_of_wakes_neither_blocks_nor_outlasts_a_drain():
    waker = Waker()
    for _ in range(100_000):
        waker.wake()
    waker.drain()
    assert not readable(waker)
    waker.wake()
    assert readable(waker)
    waker.close()


def test_waking_what_is_closed_does_nothing():
    waker = Waker()
    waker.close()
    waker.wake()
    assert waker.fileno() == -1
