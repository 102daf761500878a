"""What strangers can do on a connection between hosts: nothing."""

from __future__ import annotations

import hashlib
import hmac
import random

import pytest

from shardwise.resilience.channel import (
    LINE_BYTES,
    Channel,
    Credentials,
    MessageTooLong,
    UntrustedMessage,
    admit,
    answer,
    greeting,
)

OURS = Credentials("run", b"a secret of this run")


def connected(host: Credentials = OURS, leader: Credentials = OURS) -> tuple[Channel, Channel]:
    greeted = greeting()
    answered, at_host = answer(host, greeted)
    return admit(leader, greeted, answered), at_host


def test_messages_go_both_ways() -> None:
    leader, host = connected()
    for number in range(3):
        assert leader.message(host.line({"step": number})) == {"step": number}
        assert host.message(leader.line([number, "ö", None])) == [number, "ö", None]


@pytest.mark.parametrize(
    "other", [Credentials("run", b"another secret"), Credentials("another run", OURS.secret)]
)
def test_another_secret_or_another_run_is_not_admitted(other: Credentials) -> None:
    with pytest.raises(UntrustedMessage, match="the wrong secret"):
        connected(host=other)


def test_an_answer_counts_for_its_own_greeting_only() -> None:
    answered, _ = answer(OURS, greeting())
    with pytest.raises(UntrustedMessage):
        admit(OURS, greeting(), answered)


def test_a_line_is_taken_once_on_one_connection_in_one_direction() -> None:
    leader, host = connected()
    line = host.line("done")
    assert leader.message(line) == "done"
    with pytest.raises(UntrustedMessage):
        leader.message(line)
    with pytest.raises(UntrustedMessage):
        host.message(line)
    other_leader, _ = connected()
    with pytest.raises(UntrustedMessage):
        other_leader.message(line)


def test_a_leader_that_does_not_know_the_secret_gives_no_orders() -> None:
    _, host = connected()
    with pytest.raises(UntrustedMessage):
        host.message(Channel(b"a key that somebody made up", "leader").line("stop"))


def test_no_changed_line_is_taken() -> None:
    draw = random.Random(3)
    for _ in range(300):
        leader, host = connected()
        line = bytearray(host.line({"host": "b", "step": 7}))
        line[draw.randrange(len(line) - 1)] ^= 1 << draw.randrange(8)
        with pytest.raises(UntrustedMessage):
            leader.message(bytes(line))


def test_a_bomb_is_cut_off_and_a_long_message_is_not_sent() -> None:
    leader, host = connected()
    with pytest.raises(UntrustedMessage, match="no message"):
        leader.message(host.line("x" * (1 << 23)))  # 8 MiB, 11 KiB when compressed
    noise = random.Random(1).randbytes(LINE_BYTES).hex()
    with pytest.raises(MessageTooLong):
        host.line(noise)


def test_the_codes_are_what_rfc_2104_says() -> None:
    """The first line of a host, by hand."""
    greeted = b"shardwise-1 00112233445566778899aabbccddeeff\n"
    answered, _ = answer(OURS, greeted)
    number, code = answered.split()
    said = b" ".join([b"hello", hashlib.sha256(b"run").digest(), greeted.strip(), number])
    assert code.decode() == hmac.new(OURS.secret, said, hashlib.sha256).hexdigest()
