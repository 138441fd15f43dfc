"""Schedules of requests that come when they come, and the clock that counts only the engine's own work."""
import threading

import pytest

from bench import bubble
from minengine.request import Timeline
from minengine.workload.open_loop import EngineClock, Run, Turn, turns


def test_a_schedule_is_the_same_each_time_and_one_request_in_so_many_is_cold():
    found = turns(64, seed=3)
    assert found == turns(64, seed=3) != turns(64, seed=4)
    assert all(a.at < b.at for a, b in zip(found, found[1:]))
    assert [sum(turn.history is None for turn in found[i: i + 8]) for i in range(0, 64, 8)] == [1] * 8
    assert {turn.history for turn in turns(64, seed=3, histories=2)} == {None, 0, 1}


def test_the_clock_goes_on_by_what_it_is_told_and_reads_alike_on_another_thread():
    clock, seen = EngineClock(), []
    before = clock()
    clock.idle(5.0)
    reader = threading.Thread(target=lambda: seen.append(clock()))
    reader.start()
    reader.join()
    assert clock() >= seen[0] >= before + (5.0 if clock.is_cpu else 0.0)


def test_parts_of_a_wait_add_up_to_it():
    loaded = Timeline(arrival_s=1.0, retrieve_start_s=1.5, retrieve_end_s=1.75, polled_s=2.0, handed_off_s=2.25, admitted_s=3.0, token_s=[4.0])
    known, cold = Timeline(arrival_s=2.0, admitted_s=2.5, token_s=[3.0]), Timeline(arrival_s=2.0, admitted_s=2.0, token_s=[8.0])
    run = Run([Turn(0.0, 1), Turn(1.0, 1), Turn(2.0, None)], [loaded, known, cold], [1.0, 3.0], 9.0)
    assert run.parts_ms() == [(500.0, 250.0, 250.0, 250.0, 750.0)] and sum(run.parts_ms()[0]) == run.queue_ms()[0] == 2000.0
    assert run.queue_ms(cold=False) == [2000.0, 500.0] and run.ttft_ms(cold=True) == [6000.0]
    figures = bubble.summarise(run)
    assert set(figures) == set(bubble.FIGURES)
    assert figures["step-ms"] == pytest.approx(2500.0) and figures["after-ms"] == 1250.0 and figures["queue-ms"] == 500.0


def test_every_setting_is_served_there_and_back():
    order = [name for _, name in bubble._order(1)]
    assert order == order[::-1] and set(order) == set(bubble.SETTINGS)
