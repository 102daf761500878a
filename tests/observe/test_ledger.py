import threading

from shardwise.observe import Ledger


def test_take_gives_what_came_since_the_last_take():
    ledger = Ledger()
    ledger.record("reduce_scatter", "data", 100)
    ledger.record("all_gather", "data", 40)
    ledger.record("all_gather", "data", 2)
    first = ledger.take()
    assert first == {"all_gather/data": {"count": 2, "bytes": 42}, "reduce_scatter/data": {"count": 1, "bytes": 100}}
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
