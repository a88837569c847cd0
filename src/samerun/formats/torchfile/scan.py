"""The opcode scan: decides, before anything is built, whether a pickle can be decoded in bounded memory and time.

Python's own unpickler calls whatever a pickle names; `unpickle` takes care of that by naming only inert things. What is
left are pickles that exhaust the decoder itself: a seven-byte one asks for a memo of four billion entries, deeply
nested tuples overflow the C stack when they are hashed, tuples of -1 and -2 all hash alike and make a dictionary
quadratic. This scan walks the opcodes once, keeping only nesting depths, and refuses those. The same function runs as
plain Python for small pickles and compiled by numba for large ones, so that a `.metadata` with a million chunks is
scanned in a fraction of the time that decoding it takes.
"""

from __future__ import annotations

import mmap
from functools import cache
from typing import Any

from samerun.errors import CorruptCheckpoint, Problem

MAX_DEPTH = 100
MAX_WIDE_INTEGERS = 2_000
MAX_WIDE_BYTES = 4_096
MAX_COMPOUND_KEYS = 1_000
MAX_LINE_BYTES = 1_024
MAX_STACK = 1 << 26
MAX_MEMO = 1 << 28
MAX_MARKS = 10_000
COMPILE_FROM_BYTES = 2 << 20

# How the argument of an opcode is laid out: this many bytes, or one of these.
_LINE, _TWO_LINES, _LENGTH1, _LENGTH4, _LENGTH8, _REFUSED = 20, 21, 22, 23, 24, 30

# What an opcode takes off the stack: this many values, or all down to the last mark.
_TO_MARK = 9

# What it leaves: nothing; a value as deep as what it took; one level deeper; or it puts what it took into the value
# that lies beneath.
_NONE, _SAME, _DEEPER, _INTO = range(4)

# Which of the values taken are hashed: none, every other one (keys), all (set items).
_NO, _KEYS, _ALL = range(3)

# Opcodes that do something else.
_PLAIN, _POP, _MARK, _GET1, _GET4, _PUT1, _PUT4, _MEMOIZE, _WIDE, _STOP = range(10)

# opcode: (argument, taken, left, hashed, special)
_PUSH = (0, _SAME, _NO, _PLAIN)
_OPCODES: dict[bytes, tuple[int, int, int, int, int]] = {
    b"\x80": (1, 0, _NONE, _NO, _PLAIN),  # PROTO
    b"\x95": (8, 0, _NONE, _NO, _PLAIN),  # FRAME
    b".": (0, 0, _NONE, _NO, _STOP),
    b"(": (0, 0, _NONE, _NO, _MARK),
    b"0": (0, 0, _NONE, _NO, _POP),
    b"1": (0, _TO_MARK, _NONE, _NO, _PLAIN),  # POP_MARK
    b"N": (0, *_PUSH),
    b"\x88": (0, *_PUSH),  # NEWTRUE, NEWFALSE
    b"\x89": (0, *_PUSH),
    b"J": (4, *_PUSH),  # integers of 4, 1, 2 bytes
    b"K": (1, *_PUSH),
    b"M": (2, *_PUSH),
    b"\x8a": (_LENGTH1, 0, _SAME, _NO, _WIDE),  # integers of any width
    b"\x8b": (_LENGTH4, 0, _SAME, _NO, _WIDE),
    b"I": (_LINE, 0, _SAME, _NO, _WIDE),  # numbers as text
    b"L": (_LINE, 0, _SAME, _NO, _WIDE),
    b"F": (_LINE, 0, _SAME, _NO, _WIDE),
    b"G": (8, *_PUSH),  # BINFLOAT
    b"U": (_LENGTH1, *_PUSH),  # strings and bytes
    b"T": (_LENGTH4, *_PUSH),
    b"\x8c": (_LENGTH1, *_PUSH),
    b"X": (_LENGTH4, *_PUSH),
    b"\x8d": (_LENGTH8, *_PUSH),
    b"C": (_LENGTH1, *_PUSH),
    b"B": (_LENGTH4, *_PUSH),
    b"\x8e": (_LENGTH8, *_PUSH),
    b"\x96": (_LENGTH8, *_PUSH),  # BYTEARRAY8
    b"]": (0, *_PUSH),  # empty list, dict, tuple, set
    b"}": (0, *_PUSH),
    b")": (0, *_PUSH),
    b"\x8f": (0, *_PUSH),
    b"\x85": (0, 1, _DEEPER, _NO, _PLAIN),  # TUPLE1, 2, 3
    b"\x86": (0, 2, _DEEPER, _NO, _PLAIN),
    b"\x87": (0, 3, _DEEPER, _NO, _PLAIN),
    b"t": (0, _TO_MARK, _DEEPER, _NO, _PLAIN),
    b"l": (0, _TO_MARK, _DEEPER, _NO, _PLAIN),
    b"d": (0, _TO_MARK, _DEEPER, _KEYS, _PLAIN),
    b"\x91": (0, _TO_MARK, _DEEPER, _ALL, _PLAIN),  # FROZENSET
    b"a": (0, 1, _INTO, _NO, _PLAIN),  # APPEND, APPENDS
    b"e": (0, _TO_MARK, _INTO, _NO, _PLAIN),
    b"s": (0, 2, _INTO, _KEYS, _PLAIN),  # SETITEM, SETITEMS
    b"u": (0, _TO_MARK, _INTO, _KEYS, _PLAIN),
    b"\x90": (0, _TO_MARK, _INTO, _ALL, _PLAIN),  # ADDITEMS
    b"c": (_TWO_LINES, *_PUSH),  # GLOBAL, STACK_GLOBAL
    b"\x93": (0, 2, _SAME, _NO, _PLAIN),
    b"R": (0, 2, _SAME, _NO, _PLAIN),  # REDUCE, NEWOBJ, NEWOBJ_EX, BUILD
    b"\x81": (0, 2, _SAME, _NO, _PLAIN),
    b"\x92": (0, 3, _SAME, _NO, _PLAIN),
    b"b": (0, 1, _NONE, _NO, _PLAIN),
    b"Q": (0, 1, _SAME, _NO, _PLAIN),  # BINPERSID
    b"h": (1, 0, _NONE, _NO, _GET1),
    b"j": (4, 0, _NONE, _NO, _GET4),
    b"q": (1, 0, _NONE, _NO, _PUT1),
    b"r": (4, 0, _NONE, _NO, _PUT4),
    b"\x94": (0, 0, _NONE, _NO, _MEMOIZE),
}
# Left out, and so refused: DUP, INST, OBJ, text strings, GET, PUT and PERSID of protocol 0, the extension registry,
# out-of-band buffers. No framework writes them into a checkpoint.

_TABLES = tuple(
    bytes(_OPCODES.get(bytes([code]), (_REFUSED, 0, 0, 0, 0))[column] for code in range(256)) for column in range(5)
)

OK, TRUNCATED, UNKNOWN, UNDERFLOW, MEMO, DEEP, WIDE, COMPOUND, ENDLESS, LARGE = range(10)

_REASONS = {
    TRUNCATED: ("SR-PKL-BROKEN", "the pickle ends in the middle of an instruction"),
    UNKNOWN: ("SR-PKL-HOSTILE", "the pickle uses an instruction that no framework writes"),
    UNDERFLOW: ("SR-PKL-BROKEN", "the pickle takes more values from its stack than it put there"),
    MEMO: ("SR-PKL-HOSTILE", "the pickle numbers its memo out of order, which could exhaust memory"),
    DEEP: ("SR-PKL-HOSTILE", f"values in the pickle are nested more than {MAX_DEPTH} deep"),
    WIDE: ("SR-PKL-HOSTILE", f"the pickle has more than {MAX_WIDE_INTEGERS} very large integers, or one too large"),
    COMPOUND: ("SR-PKL-HOSTILE", f"the pickle has more than {MAX_COMPOUND_KEYS} compound dictionary keys"),
    LARGE: ("SR-PKL-HOSTILE", "the pickle holds more at once than any checkpoint does"),
    ENDLESS: ("SR-PKL-BROKEN", "the pickle has no end"),
}


def _scan(data: Any, tables: Any, stack: Any, marks: Any, memo: Any) -> tuple[int, int]:
    """Walks the opcodes of `data`. Returns (status, position): OK and one past STOP, or why and where it stopped.

    `stack` and `memo` hold the nesting depth of each value, `marks` the stack heights of open marks. They have room for
    one entry per byte of `data`, or what is allowed at most, and the operating system commits that only as it is used.
    One long function, because it is compiled as one.
    """
    arguments, takes, leaves, hashes, specials = tables
    size = len(data)
    highest, most_memo, most_marks = len(stack) - 2, len(memo) - 2, len(marks) - 2
    position = height = num_marks = num_memo = wide = compound = 0
    while position < size:
        code = data[position]
        start = position
        position += 1
        argument = arguments[code]
        length = 0
        if argument < _LINE:
            length = argument
        elif argument >= _REFUSED:
            return UNKNOWN, start
        elif argument <= _TWO_LINES:
            lines = argument - _LINE + 1
            limit = min(position + MAX_LINE_BYTES, size)
            while lines > 0 and position < limit:
                if data[position] == 10:
                    lines -= 1
                position += 1
            if lines > 0:
                return TRUNCATED, start
        else:
            width = 1 if argument == _LENGTH1 else (4 if argument == _LENGTH4 else 8)
            if position + width > size:
                return TRUNCATED, start
            for i in range(width):
                if i >= 6 and data[position + i] != 0:
                    return TRUNCATED, start
                length += data[position + i] * 256**i
            position += width
        if position + length > size:
            return TRUNCATED, start
        if height >= highest or num_memo >= most_memo or num_marks >= most_marks:
            return LARGE, start

        special = specials[code]
        if special == _PLAIN:
            taken = takes[code]
            if taken == _TO_MARK:
                if num_marks == 0:
                    return UNDERFLOW, start
                num_marks -= 1
                floor = marks[num_marks]
            else:
                floor = height - taken
            if floor < 0 or floor > height:
                return UNDERFLOW, start
            depth = 0
            for i in range(floor, height):
                if stack[i] > depth:
                    depth = stack[i]
            if depth > 0:
                hashed = hashes[code]
                if hashed != _NO:
                    for i in range(floor, height):
                        if stack[i] > 0 and (hashed == _ALL or (i - floor) % 2 == 0):
                            compound += 1
                    if compound > MAX_COMPOUND_KEYS:
                        return COMPOUND, start
                if depth >= MAX_DEPTH:
                    return DEEP, start
            height = floor
            left = leaves[code]
            if left == _SAME:
                stack[height] = depth
                height += 1
            elif left == _DEEPER:
                stack[height] = depth + 1
                height += 1
            elif left == _INTO:
                if height == 0:
                    return UNDERFLOW, start
                if depth >= stack[height - 1]:
                    stack[height - 1] = depth + 1
        elif special in (_GET1, _GET4):
            index = data[position] * 1
            if special == _GET4:
                index += data[position + 1] * 256 + data[position + 2] * 65536 + data[position + 3] * 16777216
            if index >= num_memo:
                return MEMO, start
            stack[height] = memo[index]
            height += 1
        elif special == _MARK:
            marks[num_marks] = height
            num_marks += 1
        elif special == _WIDE:
            if length > 8 or argument == _LINE:
                wide += 1
                if wide > MAX_WIDE_INTEGERS or length > MAX_WIDE_BYTES:
                    return WIDE, start
            stack[height] = 0
            height += 1
        elif height == 0:
            return UNDERFLOW, start
        elif special == _STOP:
            return OK, position
        elif special == _POP:
            if num_marks > 0 and marks[num_marks - 1] == height:
                num_marks -= 1
            else:
                height -= 1
        else:
            index = num_memo
            if special in (_PUT1, _PUT4):
                index = data[position] * 1
            if special == _PUT4:
                index += data[position + 1] * 256 + data[position + 2] * 65536 + data[position + 3] * 16777216
            if index > num_memo:
                return MEMO, start
            if index == num_memo:
                num_memo += 1
            memo[index] = stack[height - 1]
        position += length
    return ENDLESS, position


@cache
def _compiled() -> Any:
    import numba

    return numba.njit(cache=True, nogil=True)(_scan)


def scan_pickle(data: bytes | mmap.mmap, name: str) -> int:
    """Checks that a pickle can be decoded in memory and time proportional to its length. Returns that length.

    `name` says where the pickle lies, for messages.

    Raises:
        CorruptCheckpoint: if it is cut off, malformed, or built to exhaust the decoder.
    """
    if len(data) >= COMPILE_FROM_BYTES:
        status, position = scan_compiled(data)
    else:
        status, position = scan_interpreted(bytes(data))
    if status == OK:
        return position
    code, message = _REASONS[status]
    raise CorruptCheckpoint(
        Problem(
            code,
            message,
            where={"file": name, "byte": position},
            hint="the file is damaged or was made to do harm; restore it from the source and do not load it elsewhere",
        )
    )


def scan_interpreted(data: bytes) -> tuple[int, int]:
    """Scans in plain Python: about a quarter of a microsecond per opcode, nothing to import."""
    size = len(data) + 3
    return _scan(data, _TABLES, bytearray(size), [0] * min(data.count(b"(") + 3, MAX_MARKS), bytearray(size))


def scan_compiled(data: bytes | mmap.mmap) -> tuple[int, int]:
    """Scans with compiled code: importing numba costs a second, a gigabyte after that a few seconds."""
    import numpy as np

    view = np.frombuffer(data, np.uint8)
    size = len(view) + 3
    tables = tuple(np.frombuffer(table, np.uint8) for table in _TABLES)
    stack, memo = np.empty(min(size, MAX_STACK), np.uint8), np.empty(min(size, MAX_MEMO), np.uint8)
    status, position = _compiled()(view, tables, stack, np.empty(MAX_MARKS, np.int64), memo)
    return int(status), int(position)
