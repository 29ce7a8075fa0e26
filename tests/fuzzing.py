"""Damage for files that are read: mutations of bytes and of JSON, all from a seed; and an alarm for
what hangs."""

import copy
import json
import signal
from contextlib import contextmanager

_BYTES = (
    *(b"", b"\0", b"\xff\xfe", b"\xc3\x28", b"\xe2\x80\xae", b"\n", b" ", b"'", b'"', b"\\"),
    *(b"{", b"}", b"[", b"]", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"1e999", b"-1"),
    *(b"NaN", b"-Infinity", b"null", b"true", b"99999999999999999999", b": ", b"- ", b"&a "),
    *(b"*a", b"<<: *a", b"!!python/object/apply:os.system ['touch HACKED']", b"!!binary x"),
    *(b"../../HACKED", b"/etc/passwd", b"${data.path}", b"${a.b", b"=cmd|' /C calc'!A0"),
    *(b"<script>alert(1)</script>", b"\x1b[2J"),
)
_VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 5e-324),
    *("", "x", "\0", "nan", "../../HACKED", "x" * 10_000, "\ud800", "<script>", "é", "0"),
    *([], {}, [[]], [None], {"": 0}, {"float": "nan"}, {"float": "inf"}, {"float": "x"}),
    *([0] * 1000, {"headprune": "X"}),
)


def changed(path, **values):
    """Sets keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def mutated_bytes(data, draw):
    """One to four changes: bytes flipped, cut out, doubled, moved, replaced by something awkward,
    or all after a place gone."""
    for _ in range(draw.randint(1, 4)):
        a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        b = min(b, a + draw.choice((1, 2, 8, 64, 1 << 20)))
        kind = draw.randrange(6)
        if kind == 0 and data:
            at = draw.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:a] + data[b:]
        elif kind == 2:
            data = data[:b] + data[a:b] + data[b:]
        elif kind == 3:
            data = data[:a] + draw.choice(_BYTES) + data[b:]
        elif kind == 4:
            data = data[:a] + draw.choice(_BYTES) + data[a:]
        elif draw.random() < 0.3:
            data = data[:a]
    return data


def mutated_json(data, draw):
    """One to three changes in a JSON document: a value replaced, a key gone, doubled under another
    name or renamed, an item gone or doubled."""
    data = copy.deepcopy(data)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(data))
        if not places:
            return _awkward(draw)
        home, key = draw.choice(places)
        kind = draw.randrange(5)
        if kind == 0:
            del home[key]
        elif kind == 1 and isinstance(home, dict):
            home[str(draw.choice(_VALUES))[:20]] = home.pop(key)
        elif kind == 2 and isinstance(home, list):
            home.insert(key, copy.deepcopy(home[key]))
        elif kind == 3:
            other, place = draw.choice(places)
            home[key] = copy.deepcopy(other[place])
        else:
            home[key] = _awkward(draw)
    return data


def _awkward(draw):
    """One of the values, of its own: a list that two documents share would be changed in both."""
    return copy.deepcopy(draw.choice(_VALUES))


def mutated(data, draw):
    """A mutation of a file, by its structure where it is JSON, half of the time."""
    if draw.random() < 0.5:
        try:
            return json.dumps(mutated_json(json.loads(data), draw)).encode("utf-8", "surrogatepass")
        except ValueError:
            pass
    return mutated_bytes(data, draw)


def mutated_lines(data, draw):
    """A mutation of one of the lines of a file of JSON lines, or of the whole file."""
    if draw.random() < 0.3:
        return mutated_bytes(data, draw)
    lines = data.splitlines()
    at = draw.randrange(len(lines))
    if draw.random() < 0.8:
        lines[at] = mutated(lines[at], draw)
    else:
        lines[at] = json.dumps(draw.choice(_VALUES)).encode()
    return b"\n".join(lines) + b"\n"


def mutated_header(data, draw):
    """A mutation of a safetensors file, of its header most of the time."""
    length = int.from_bytes(data[:8], "little")
    if draw.random() < 0.3:
        return mutated_bytes(data, draw)
    header = mutated(data[8 : 8 + length], draw)
    n = len(header)
    if draw.random() >= 0.8:
        n = draw.choice((0, 1, n + 1, 2**40, 2**64 - 1))
    return n.to_bytes(8, "little") + header + data[8 + length :]


def _places(data):
    """``(container, key)`` of everything in a document."""
    todo = [data]
    while todo:
        home = todo.pop()
        items = home.items() if isinstance(home, dict) else ()
        if isinstance(home, list):
            items = enumerate(home)
        for key, value in list(items):
            yield home, key
            if isinstance(value, (dict, list)):
                todo.append(value)


class TooLong(BaseException):
    """No Exception: what takes any error for one of a damaged file must not take this one."""


@contextmanager
def alarm(seconds):
    """Rings after so many seconds of work, not of waiting for a turn on a busy machine; and, in
    case it waits for ever, after twenty times as many by the clock."""
    late = False

    def ring(*_):
        nonlocal late
        late = True
        raise TooLong(f"more than {seconds} s")

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, 1), (signal.SIGALRM, signal.ITIMER_REAL, 20))
    before = [signal.signal(rings, ring) for rings, _, _ in clocks]
    for _, clock, times in clocks:
        signal.setitimer(clock, seconds * times)
    try:
        yield
    finally:
        for (rings, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(rings, handler)
        if late:  # and if somebody has caught it all the same
            raise TooLong(f"more than {seconds} s")
