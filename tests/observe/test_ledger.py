import threading

from shardwise.observe import Collective, Ledger, axis_times


def test_take_gives_what_came_since_the_last_take():
    ledger = Ledger()
    ledger.record("reduce_scatter", "data", 100)
    ledger.record("all_gather", "data", 40)
    ledger.record("all_gather", "data", 2)
    first = ledger.take()
    assert first == {
        "all_gather/data": {"count": 2, "bytes": 42},
        "reduce_scatter/data": {"count": 1, "bytes": 100},
    }
    assert list(first) == sorted(first)
    assert ledger.take() == {}
    ledger.record("all_gather", "data", 8)
    assert ledger.take() == {"all_gather/data": {"count": 1, "bytes": 8}}


def test_nothing_is_lost_when_threads_record_while_another_takes():
    ledger = Ledger()
    threads, each = 8, 2000
    taken = []

    def record(thread: int) -> None:
        for index in range(each):
            ledger.record("all_reduce", "data" if thread % 2 else "replica", index)

    workers = [threading.Thread(target=record, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        taken.append(ledger.take())
    taken.append(ledger.take())
    for axis in ("data", "replica"):
        expected = {"count": threads // 2 * each, "bytes": threads // 2 * sum(range(each))}
        got = [part.get(f"all_reduce/{axis}", {"count": 0, "bytes": 0}) for part in taken]
        assert {key: sum(one[key] for one in got) for key in expected} == expected


def test_an_axis_is_busy_while_any_collective_runs_and_hidden_where_nobody_waits():
    def ran(axis: str, start: float, ended: float | None) -> Collective:
        return Collective("all_reduce", axis, 8, None, start, ended)

    collectives = [
        ran("data", 1, 4),
        ran("data", 3, 5),
        ran("tensor", 4, 6),
        ran("data", 8, 9),
        ran("pipeline", 1, None),
    ]
    waits = [(4.5, 5.5), (8.0, 10.0)]
    assert axis_times(collectives, waits) == {
        "data": {"seconds": 5.0, "hidden": 3.5},
        "tensor": {"seconds": 2.0, "hidden": 1.0},
    }


def test_collectives_that_were_taken_have_their_times_unless_the_ledger_keeps_none():
    timed, untimed = Ledger(), Ledger(timed=False)
    for ledger in (timed, untimed):
        first = ledger.record("all_reduce", "data", 8, plain=16)
        first.end()
        ledger.record("all_gather", "data", 8)
        ledger.take()
    (ended, under_way) = timed.taken
    assert ended.ended is not None
    assert ended.ended >= ended.start
    assert (ended.bytes, ended.plain, under_way.ended) == (8, 16, None)
    assert untimed.taken == []
